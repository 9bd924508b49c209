"""Megatron's loading flags together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.options import LoadOptions
from megatron_flex.checkpoint.save import save

NAMES = ["decoder.weight", "optimizer.state.exp_avg.decoder.weight"]


def test_a_plain_load_takes_everything() -> None:
    options = LoadOptions()
    assert (options.optimizer, options.rng) == (True, True)
    assert options.wanted(NAMES) == NAMES


def test_finetuning_takes_the_weights_only() -> None:
    options = LoadOptions(finetune=True)
    assert (options.optimizer, options.rng) == (False, False)
    assert options.wanted(NAMES) == NAMES[:1]


def test_without_optimizer_the_position_still_resumes() -> None:
    options = LoadOptions(load_optim=False)
    assert (options.optimizer, options.rng) == (False, True)
    assert options.wanted(NAMES) == NAMES[:1]


def test_without_rng_all_else_resumes() -> None:
    options = LoadOptions(load_rng=False)
    assert (options.optimizer, options.rng) == (True, False)


def test_nothing_to_load_starts_from_scratch_unless_that_is_an_error(tmp_path: Path) -> None:
    assert LoadOptions().iteration(tmp_path / "typo") is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        LoadOptions(exit_on_missing_checkpoint=True).iteration(tmp_path / "typo")


def test_a_step_asked_for_is_loaded_instead_of_the_latest(tmp_path: Path) -> None:
    for iteration in (1, 2):
        save(tmp_path, iteration, {"w": torch.zeros(1)}, {}, group=None)
    assert LoadOptions().iteration(tmp_path) == 2
    assert LoadOptions(ckpt_step=1).iteration(tmp_path) == 1
    with pytest.raises(CheckpointError, match=r"no checkpoint of iteration 3 .*there is 1, 2"):
        LoadOptions(ckpt_step=3).iteration(tmp_path)
