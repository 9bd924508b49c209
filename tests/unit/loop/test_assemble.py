"""Data that a run needs and the flags leave nothing of."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_flex.arguments import parse
from megatron_flex.data.errors import DataError
from megatron_flex.loop.assemble import assemble
from megatron_flex.runtime.world import World
from megatron_flex.training import Trainer
from tests.end_to_end import runs
from tests.unit.data.files import write_flat


def assembled(*words: str) -> int:
    """Documents for validation."""
    parts = assemble(
        parse([*runs.MODEL, *runs.TRAINING, "--train-iters", "9", *words], world_size=1)
    )
    return 0 if parts.valid is None else sum(s.selection.size for s in parts.valid.sets)


def data(tmp_path: Path, documents: int) -> str:
    return write_flat(tmp_path / f"d{documents}", [[1, 2, 3]] * documents)


def test_a_split_that_rounds_to_no_validation_document_is_an_error(tmp_path: Path) -> None:
    words = ("--data-path", data(tmp_path, 12), "--eval-interval", "1", "--split")
    assert assembled(*words, "95,5,0") == 1  # 11.4 is the border
    message = (
        "--eval-interval needs validation data, but --split 97,3,0 leaves none of the 12 documents"
        " for valid"
    )
    with pytest.raises(DataError, match=message):
        assembled(*words, "97,3,0")
    assert assembled(*words[:2], "--split", "97,3,0") == 0  # nobody asks for it


def test_a_split_that_rounds_to_no_training_document_is_an_error(tmp_path: Path) -> None:
    words = ("--data-path", data(tmp_path, 2), data(tmp_path, 3), "--split", "1,99,0")
    with pytest.raises(DataError, match=r"training needs documents, but .* of the 5 documents"):
        assembled(*words)


@pytest.mark.parametrize(("length", "warned"), [(200, True), (64, False)])
def test_what_is_cut_off_is_said_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int, warned: bool
) -> None:
    prefix = write_flat(tmp_path / "d_chat_document", [[1] * (length + 1)] * 8)
    words = [*runs.MODEL, *runs.TRAINING, "--train-iters", "9", "--data-path", prefix]
    config = parse([*words, "--split", "1"], world_size=1)
    world = World.create(torch.device("cpu"), timedelta(seconds=10))
    Trainer(config, world, assemble(config)).steps.close()
    said = (
        " warning: cut: 8 samples (100.0%) are longer than --seq-length 64 and lose their ends,"
        " 68.0% of all tokens: raise it, or make several samples of a document with --overlong"
        " split\n"
    )
    printed = capsys.readouterr().out
    assert printed.count(f" warning: {prefix} has conversations, and the loss is on all") == 1
    assert (said in printed) == warned
    assert printed.count("of all tokens") == warned, "it is said once"
    assert "% of the tokens" not in printed
    config = parse([*words, "--split", "1", "--overlong", "split"], world_size=1)
    source = assemble(config).train
    assert source is not None
    assert source.sets[0].lengths(np.arange(4)).tolist() == ([64] * 3 + [8] if warned else [64] * 4)


def test_prompts_that_end_in_the_end_token_are_warned_of(tmp_path: Path) -> None:
    prompts = [[1, 2, runs.VOCABULARY] if i % 2 else [1, 2] for i in range(8)]
    write_flat(tmp_path / "d_prompt_document", prompts)
    write_flat(tmp_path / "d_completion_document", [[3, runs.VOCABULARY]] * 8)
    words = [*runs.MODEL, *runs.TRAINING, "--train-iters", "9", "--data-path", str(tmp_path / "d")]
    parts = assemble(parse([*words, "--split", "1", "--sample-format", "pair"], world_size=1))
    (warning,) = parts.warnings
    assert warning.startswith("4 of 8 prompts in ")
    assert f"end in the end token {runs.VOCABULARY}," in warning
