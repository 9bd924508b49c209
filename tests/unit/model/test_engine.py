"""Transformer Engine's layers where there is no GPU: what is asked of it, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from megatron_flex.checkpoint.load import CheckpointError, check_model
from megatron_flex.model import check_layers
from megatron_flex.model.config import FP8_ALIGNMENT, Fp8Recipe, local
from megatron_flex.model.modules import ApexNorm, apex_serves, layer_modules
from tests.unit.model.support import make_config

ROOT = Path(__file__).resolve().parents[3]
ENGINE = make_config(transformer_impl="transformer_engine")


def test_blocks_of_its_modules_compute_what_local_ones_do() -> None:
    """In a process of its own, with its interface in PyTorch: see ``tests/engine``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.checks"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    assert len(json.loads(run.stdout.splitlines()[-1])) == 5


@pytest.mark.parametrize(
    ("version", "device", "words"),
    [
        ("2.11.0", "cpu", "on NVIDIA GPUs only"),
        (None, "cpu", "on NVIDIA GPUs only"),
        (None, "cuda", "transformer-engine is not installed; use --transformer-impl local"),
        ("2.8.0+abc", "cuda", "2.9 or newer, not 2.8.0"),
        ("1.13", "cuda", "2.9 or newer"),
    ],
)
def test_a_machine_that_cannot_run_it_says_why(
    version: str | None, device: str, words: str
) -> None:
    reason = check_layers.refusal(version, device)
    assert reason is not None
    assert "--transformer-impl transformer_engine" in reason
    assert words in reason


@pytest.mark.parametrize("version", ["2.9.0", "2.11.0+cu13", "2.20", "3.0", "unknown"])
def test_versions_that_megatron_core_takes_are_taken(version: str) -> None:
    assert check_layers.refusal(version, "cuda") is None


def test_the_check_is_of_models_that_ask_for_it() -> None:
    check_layers.check_layers(local(ENGINE), torch.device("cpu"))
    with pytest.raises(ValueError, match="use --transformer-impl local"):
        check_layers.check_layers(ENGINE, torch.device("cpu"))


def test_a_checkpoint_does_not_know_whose_modules_wrote_it() -> None:
    engine = replace(ENGINE, fp8_format="hybrid", fp8_recipe="blockwise", persist_layer_norm=False)
    check_model(vars(engine), vars(local(make_config())))
    with pytest.raises(CheckpointError, match="num_layers"):
        check_model(vars(engine), vars(make_config(num_layers=3)))


def test_fp8_says_which_tokens_fit() -> None:
    assert ENGINE.alignment == 1
    for recipe in get_args(Fp8Recipe):
        found = replace(ENGINE, fp8_format="e4m3", fp8_recipe=recipe)
        assert found.alignment == FP8_ALIGNMENT[recipe]
    with pytest.raises(ValueError, match="needs Transformer Engine"):
        make_config(fp8_format="e4m3")


@pytest.mark.parametrize(
    ("normalization", "installed", "cuda", "apex"),
    [
        ("LayerNorm", True, True, True),
        ("LayerNorm", False, True, False),
        ("LayerNorm", True, False, False),
        ("RMSNorm", True, True, False),
    ],
)
def test_layer_norm_is_apexs_where_it_is(
    normalization: str, installed: bool, cuda: bool, apex: bool
) -> None:
    config = make_config(normalization=normalization)
    assert apex_serves(config, installed=installed, cuda=cuda) is apex


@pytest.mark.skipif(torch.cuda.is_available(), reason="Apex may be installed")
def test_without_apex_and_transformer_engine_layers_are_local() -> None:
    assert layer_modules(make_config()).alone is not ApexNorm
    with pytest.raises(ImportError, match="--transformer-impl local"):
        layer_modules(ENGINE)
