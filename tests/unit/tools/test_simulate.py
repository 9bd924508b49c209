"""tools/simulate.py: files and tables from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_flex.simulator.presets import CONFIGURATIONS
from megatron_flex.telemetry.jsonl import read
from tools import simulate

SMALL = "--cluster a100x4 --global-batch-size 4 --tuning-batches 1 --simulations 1".split()


def test_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CONFIGURATIONS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--configurations flexpipes", "no configuration is named flexpipes; --list says"),
        ("--iterations 0", "must be at least 1"),
        ("--simulations few", "--simulations few: expected a number, or auto"),
        ("--cluster nowhere", "no cluster 'nowhere'"),
        ("--lengths-file nothing.csv", "nothing.csv cannot be read"),
        ("--long-share 2", "between 0 and 1, not 2.0"),
        ("--tensor-model-parallel-size 1 8", "groups of 8 devices do not divide a server's 4"),
    ],
)
def test_wrong_words_are_one_message(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(words.split()) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_files_are_the_same_again_and_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["packed-1f1b", "flexpipe-untuned"]
    words = [*SMALL, "--iterations", "3", "--configurations", *names, "--jobs", "2", "--output"]
    assert simulate.main([*words, str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["configuration", *names]
    for name in names:
        records = read(tmp_path / "a" / f"{name}.jsonl")
        assert [r["event"] for r in records] == ["run"] + 3 * ["iteration"]
        assert records[0]["configuration"] == name
    assert simulate.main([*words, str(tmp_path / "a")]) == 0  # nothing is left to do
    assert capsys.readouterr().out.splitlines() == shown
    assert simulate.main([*words, str(tmp_path / "a"), "--seed", "7"]) == 1
    assert "same arguments" in capsys.readouterr().err


def test_what_cannot_be_is_said_beside_what_can(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--iterations", "1", "--configurations", "packed-1f1b", "--memory-budget-gb", "2"]
    assert simulate.main([*SMALL, *words]) == 1
    assert "packed-1f1b: no even layout fits all batches" in capsys.readouterr().err


def test_lengths_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lengths.csv").write_text("length\n" + "500\n" * 8)
    words = ["--lengths-file", str(tmp_path / "lengths.csv"), "--output", str(tmp_path / "out")]
    chosen = ["--iterations", "1", "--configurations", "megatron-pad"]
    assert simulate.main([*SMALL, *words, *chosen]) == 0
    lines = (tmp_path / "out" / "megatron-pad.jsonl").read_text().splitlines()
    record = json.loads(lines[1])
    assert (record["tokens"], record["padding"], record["longest"]) == (2000, 0, 500)


def test_another_content_of_a_file_is_another_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the answer would be that of the lengths before."""
    file = tmp_path / "batches.txt"
    words = [*SMALL, "--batch-file", str(file), "--output", str(tmp_path / "out"),
             "--iterations", "1", "--configurations", "megatron-pad"]  # fmt: skip
    for lengths, status in (("500 300", 0), ("500 300", 0), ("500 200", 1)):
        file.write_text(lengths)
        assert simulate.main(words) == status
    assert "is not this simulation, with the same arguments," in capsys.readouterr().err


def test_several_sizes_stand_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--iterations", "1", "--tensor-model-parallel-size", "1", "2", "4",
             "--configurations", "flexpipe-untuned", "--output", str(tmp_path)]  # fmt: skip
    assert simulate.main(words) == 0
    shown = capsys.readouterr().out.splitlines()
    names = [f"flexpipe-untuned{size}" for size in ("", "-tp2", "-tp4")]
    assert [line.split()[0] for line in shown[1:]] == names
    runs = [read(tmp_path / f"{name}.jsonl") for name in names]
    assert [records[0]["workers"] for records in runs] == [4, 2, 1]
    # Balance is that of layers that nobody shares.
    assert len({records[1]["seconds-perfect"] for records in runs}) == 1
    assert runs[2][1]["plan"].startswith("0:34@0")


def test_segments_are_as_many_runs_that_begin_anew(tmp_path: Path) -> None:
    words = [*SMALL, "--iterations", "4", "--configurations", "flexpipe-untuned", "packed-1f1b",
             "--segments", "2", "--output", str(tmp_path)]  # fmt: skip
    assert simulate.main(words) == 0
    for name in ("flexpipe-untuned", "packed-1f1b"):
        records = read(tmp_path / f"{name}.jsonl")[1:]
        assert [r["iteration"] for r in records] == [1, 2, 3, 4]
    planned = read(tmp_path / "flexpipe-untuned.jsonl")[1:]
    assert planned[0]["simulations"] == planned[2]["simulations"] > planned[1]["simulations"]
    before = (tmp_path / "flexpipe-untuned.jsonl").read_bytes()
    assert simulate.main(words) == 0
    assert (tmp_path / "flexpipe-untuned.jsonl").read_bytes() == before
