"""From a Hugging Face directory through training to one that transformers evaluates alike."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs
from tests.end_to_end.processes import ROOT, Job
from tests.unit.checkpoint.hugging_face import make, to_flex, to_hf
from tests.unit.data.files import write_flat

TRAINING = shlex.split(
    "--use-checkpoint-args --finetune --seq-length 64 --distributed-backend gloo --num-workers 0"
    " --micro-batch-tokens 50 --global-batch-size 8 --train-iters 20 --lr 3e-3 --min-lr 1e-4"
    " --lr-decay-style cosine --log-interval 1 --eval-interval 20 --eval-iters 1"
)
TOKENIZER = ROOT / "tests/data/tokenizer_with_truncation/tokenizer.json"
LENGTHS = (60, 3, 17, 42, 2, 25, 9, 31)


def documents(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Counting texts, which can be learnt: each token follows from the one before."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(89, (len(lengths),), generator=generator).tolist()
    return [
        [(start + 7 * i) % 89 for i in range(n)] for start, n in zip(starts, lengths, strict=True)
    ]


def their_loss(directory: Path, texts: list[list[int]]) -> float:
    """Mean loss of all next tokens, one text at a time."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    total, count = 0.0, 0
    for text in texts:
        tokens = torch.tensor(text)
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0].double()
        losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
        total, count = total + float(losses), count + len(text) - 1
    return total / count


@pytest.mark.parametrize(
    ("name", "size", "sharing", "plan"),
    [
        ("llama 3", 4, 2, "0:3@0 | 3:4@1 | 4:7@1 | 7:8@0; schedule zb-v"),
        ("qwen2, tied", 3, 1, "0:4@0,1 | 4:8@2"),
        ("gpt2", 2, 1, "0:3@0 | 3:4@1 | 4:7@1 | 7:8@0; schedule v-half"),
    ],
)
def test_transformers_gives_our_validation_loss_of_what_we_trained(
    workers: WorkerPool, tmp_path: Path, name: str, size: int, sharing: int, plan: str
) -> None:
    make(name).save_pretrained(tmp_path / "there")
    assert to_flex(tmp_path / "there", tmp_path / "here") == 0
    texts = documents(1, LENGTHS)
    shared = ["--tensor-model-parallel-size", "2", "--sequence-parallel"] if sharing == 2 else []
    train = write_flat(tmp_path / "train", documents(2, LENGTHS * 8))
    valid = write_flat(tmp_path / "valid", texts)
    run = runs.run(
        workers,
        size,
        [*TRAINING, *shared, "--flexpipe-plan", plan,
         "--train-data-path", train, "--valid-data-path", valid,
         "--load", str(tmp_path / "here"), "--save", str(tmp_path / "trained")],
    )  # fmt: skip
    assert len(run.losses) == 20
    ours = run.history.validations[-1].losses["lm loss"]
    before = their_loss(tmp_path / "there", texts)
    assert ours < before - 0.5
    assert to_hf(tmp_path / "trained", tmp_path / "back", "--hf-source", tmp_path / "there") == 0
    assert their_loss(tmp_path / "back", texts) == pytest.approx(ours, rel=1e-5)


def test_a_run_begins_with_load_hf_and_goes_on_without_that_directory(tmp_path: Path) -> None:
    there, save = tmp_path / "there", tmp_path / "save"
    make("qwen2", vocab_size=400).save_pretrained(there)
    (there / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    train = write_flat(tmp_path / "train", documents(2, LENGTHS * 8))
    argv = shlex.split(
        f"--load-hf {there} --save {save} --load {save} --data-path {train} --split 1,0,0"
        " --seq-length 64 --distributed-backend gloo --num-workers 0 --micro-batch-tokens 50"
        " --global-batch-size 8 --lr 1e-3 --log-interval 1 --pipeline-model-parallel-size 2"
    )
    with Job(tmp_path / "wrong").start("pretrain_gpt.py", argv, size=2) as job:
        assert job.wait(60) == [2, 2]
        assert "give either --train-iters or --train-samples" in job.output
    assert not save.exists()

    words = [*argv, "--train-iters", "2", "--override-opt_param-scheduler"]
    with Job(tmp_path / "first").start("pretrain_gpt.py", words, size=2) as job:
        assert job.wait(60) == [0, 0], job.output
    assert len(list(save.glob("hugging_face-*"))) == 1
    shutil.rmtree(there)
    words = [*argv, "--train-iters", "3", "--override-opt_param-scheduler"]
    with Job(tmp_path / "second").start("pretrain_gpt.py", words, size=2) as job:
        assert job.wait(60) == [0, 0], job.output
        assert "starting at iteration 2" in job.output
