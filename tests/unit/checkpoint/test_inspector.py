"""The command that says what a checkpoint holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_flex.checkpoint.save import save
from tools.checkpoint import checkpoint_inspector as inspector


def _save(directory: Path, iteration: int, moment: float = 0.0) -> Path:
    tensors = {}
    for layer in range(3):
        name = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
        tensors[name] = torch.full((64, 16), float(layer))
        tensors[f"optimizer.state.exp_avg.{name}"] = torch.full((64, 16), moment + layer)
    common = {"model": {"num_layers": 3}, "progress": {"iteration": iteration}}
    return save(directory, iteration, tensors, common, group=None)


def test_the_report_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for iteration in (5, 10):
        _save(tmp_path, iteration)
    assert inspector.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for line in (
        "iterations: 5, 10",
        "newest:     10",
        "num_layers... 3",
        "progress.iteration... 10",
        "weights                   3   3,072  12.0 KiB",
        "optimizer: exp_avg        3   3,072  12.0 KiB",
        "decoder.layers.*.mlp.linear_fc1.weight                          64x16  float32      3",
        "all files match their checksums",
    ):
        assert line in text


def test_an_earlier_iteration_is_shown_tensor_by_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for iteration in (5, 10):
        _save(tmp_path, iteration)
    assert inspector.main([str(tmp_path), "--iteration", "5", "--tensors", "--no-verify"]) == 0
    text = capsys.readouterr().out
    assert "progress.iteration... 5" in text
    assert "decoder.layers.1.mlp.linear_fc1.weight" in text
    assert "checksums\n" not in text


def test_two_checkpoints_are_compared_tensor_by_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(tmp_path / "a", 10)
    _save(tmp_path / "b", 20, moment=1.0)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert inspector.main([a, "--compare", a]) == 0
    assert "0 of 6 tensors differ" in capsys.readouterr().out
    assert inspector.main([a, "--compare", b]) == 1
    text = capsys.readouterr().out
    assert "3 of 6 tensors differ from iteration 20" in text
    assert "  optimizer.state.exp_avg.decoder.layers.2.mlp.linear_fc1.weight: values\n" in text


def test_a_damaged_file_is_reported_with_exit_status_one(tmp_path: Path) -> None:
    path = _save(tmp_path, 10) / "__0_0.distcp"
    os.truncate(path, 100)
    command = Path(inspector.__file__)
    done = subprocess.run(
        [sys.executable, command, tmp_path], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"checkpoint_inspector: {path} is truncated")


def test_sizes_are_written_for_people() -> None:
    sizes = [0, 1023, 1024, 1536 * 1024, 7 * 2**40, 5000 * 2**40]
    texts = ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "7.0 TiB", "5000.0 TiB"]
    assert [inspector.size_text(size) for size in sizes] == texts
