"""``--tensor-model-parallel-size auto``: what is built with each size, and what is chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_flex.arguments import ArgumentsError, automatic_tensor_size, parse, with_tensor_size
from megatron_flex.config.config import Config
from megatron_flex.loop.tensor_size import chosen_size, outlook

FLAGS = [
    "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "128",
    "--max-position-embeddings", "128", "--micro-batch-tokens", "128", "--global-batch-size", "8",
    "--train-iters", "2", "--lr", "1", "--mock-data", "--tokenizer-type", "NullTokenizer",
    "--vocab-size", "100", "--distributed-backend", "gloo",
]  # fmt: skip
AUTO = [*FLAGS, "--tensor-model-parallel-size", "auto"]


def test_the_size_takes_the_place_of_the_word() -> None:
    assert automatic_tensor_size(AUTO)
    assert automatic_tensor_size(["--tensor-model-parallel-size=auto"])
    assert not automatic_tensor_size([*FLAGS, "--slice-tokens", "auto"])
    overridden = ["--sequence-parallel", *AUTO, "--tensor-model-parallel-size", "2"]
    assert not automatic_tensor_size(overridden)
    p = parse(overridden, world_size=2, tensor_size=lambda *_: 1).parallel
    assert (p.tensor_model_parallel_size, p.sequence_parallel) == (2, True)
    words = ["--sequence-parallel", *AUTO, "--flexpipe-slice-tokens", "auto"]
    for size, kept in ((1, 1), (2, 0)):
        expected = [*FLAGS, "--tensor-model-parallel-size", str(size)]
        found = with_tensor_size(words, size)
        assert found == [*words[:1], *expected, "--flexpipe-slice-tokens", "auto"][kept:]


def test_every_size_is_built_from_the_same_flags_and_one_is_taken() -> None:
    asked: list[int] = []

    def choose(build: Callable[[int], Config], workers: int) -> int:
        asked.append(workers)
        assert build(1).parallel.tensor_model_parallel_size == 1
        return 1

    config = parse(AUTO, world_size=4, tensor_size=choose)
    assert (config.devices, asked) == (4, [4])
    assert parse(FLAGS, world_size=4, tensor_size=choose) == parse(FLAGS, world_size=4)
    assert asked == [4]


def test_what_cannot_be_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    def build(size: int) -> Config:
        if size > 1:
            raise ArgumentsError([f"no {size}", "nor anything else"])
        return parse(FLAGS, world_size=2)

    assert outlook(build, 2).problem == "no 2; nor anything else"
    assert chosen_size(build, 2) == 1
    said = capsys.readouterr().out
    assert "tensor parallelism 1: " in said
    assert "an iteration" in said
    assert "tensor parallelism 2: cannot be: no 2; nor anything else" in said
    with pytest.raises(ArgumentsError, match="no 4"):
        chosen_size(lambda size: build(4), 2)
