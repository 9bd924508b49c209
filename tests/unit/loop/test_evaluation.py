"""Means of an evaluation, by hand: over all targets, whatever batches they came in."""

from __future__ import annotations

import shlex
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch

from megatron_flex.arguments import parse
from megatron_flex.checkpoint.layout import latest
from megatron_flex.config.config import Architecture
from megatron_flex.data.batches import BatchSource
from megatron_flex.data.errors import DataError
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatches import cut_by_count
from megatron_flex.loop.assemble import assemble
from megatron_flex.loop.evaluation import evaluate
from megatron_flex.runtime.world import World
from megatron_flex.training import Trainer
from tests.oracles.model import Training
from tests.unit.data.files import write

MODEL = shlex.split(
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 64"
    " --micro-batch-tokens 50 --global-batch-size 4 --train-iters 1 --lr 1e-3 --num-workers 0"
    " --distributed-backend gloo --init-method-std 0.1"
)
#: Sentences of very different lengths, so that batches have very different numbers of targets.
DOCUMENTS = [
    [[10 + (7 * d + i) % 60 for i in range(n)], [10 + (5 * d + i) % 60 for i in range(n + 1)]]
    for d, n in enumerate((2, 3, 25, 1, 4, 28, 2, 2, 19))
]


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_means_are_over_all_targets(tmp_path: Path, architecture: Architecture) -> None:
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join([*specials, *(f"w{i}" for i in range(75))]) + "\n")
    prefix = write(tmp_path / "text", DOCUMENTS)
    words = [
        *MODEL, "--train-data-path", prefix, "--valid-data-path", prefix,
        "--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(vocabulary),
    ]  # fmt: skip
    config = parse(words, architecture=architecture, world_size=1)
    world = World.create(torch.device("cpu"), timedelta(seconds=10))
    trainer = Trainer(config, world, assemble(config))
    source, iterations = trainer.parts.valid, trainer.iterations
    assert source is not None
    holdings = iterations.executor.holdings
    weights = {n: t for s in holdings for n, t in s.named_state(optimizer=False).items()}
    everything = source.batch(0, len(DOCUMENTS))
    packed = [
        source.packed(part, inputs=True, targets=True) for part in cut_by_count(everything, 1)
    ]
    with torch.no_grad():
        means = Training(holdings.config, weights).means(packed)
    names = ("lm loss", "sop loss")[: len(means)]
    assert len(names) == (2 if architecture == "bert" else 1)
    expected = {name: float(mean) for name, mean in zip(names, means, strict=True)}
    for size in (9, 4, 2):  # the last batch of the second and the third is of one sample
        found = evaluate(iterations, trainer.steps, source, size, None)
        assert found.losses == pytest.approx(expected, rel=2e-6)
        assert (found.samples, found.tokens) == (9, everything.tokens)
    first = evaluate(iterations, trainer.steps, source, 2, 2)
    assert first.samples == 4
    with torch.no_grad():
        means = Training(holdings.config, weights).means(packed[:4])
    trainer.steps.close()
    assert list(first.losses.values()) == pytest.approx([float(m) for m in means], rel=2e-6)
    trainer.steps.close()


class Damaged:
    """A test set whose file cannot be read to its end."""

    num_samples = 4
    sets = ()

    def batch(self, first_sample: int, size: int) -> GlobalBatch:
        raise DataError("test.bin is truncated")


def test_an_error_at_the_end_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    words = shlex.split(
        f"--mock-data --tokenizer-type NullTokenizer --vocab-size 70 --eval-interval 1"
        f" --eval-iters 1 --save {tmp_path} --async-save"
    )
    config = parse([*MODEL, *words], world_size=1)
    world = World.create(torch.device("cpu"), timedelta(seconds=10))
    parts = replace(assemble(config), test=cast(BatchSource, Damaged()))
    with pytest.raises(DataError, match="truncated"):
        Trainer(config, world, parts).run()
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint")]
    assert latest(tmp_path) == 1
