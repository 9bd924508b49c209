"""The recorder that the loop calls."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_flex.arguments import dump
from megatron_flex.telemetry.jsonl import read
from megatron_flex.telemetry.recorder import open_recorder
from megatron_flex.telemetry.sink import TelemetryError
from tests.unit import disk
from tests.unit.config.commands import config
from tests.unit.telemetry.records import record, validation
from tests.unit.telemetry.test_tensorboard import series


def test_the_flags_decide_what_is_recorded(tmp_path: Path) -> None:
    lines: list[str] = []
    c = config(
        "--log-interval 2 --log-format megatron --log-throughput --device-peak-tflops 4"
        f" --log-jsonl {tmp_path}/log.jsonl --tensorboard-dir {tmp_path}/board"
    )
    with open_recorder(c, echo=lines.append) as recorder:
        for k in range(1, 5):
            recorder.iteration(record(k))
        recorder.validation(validation(4))
    assert [line.split("|")[0].split("]")[1].split() for line in lines[:3]] == [
        ["iteration", "1/", "20"],
        ["iteration", "2/", "20"],
        ["iteration", "4/", "20"],
    ]
    assert "MFU: 25.0%" in lines[0]
    assert "validation loss at iteration 4" in lines[4]
    assert [o["event"] for o in read(tmp_path / "log.jsonl")] == ["iteration"] * 4 + ["validation"]
    assert len(list((tmp_path / "board").iterdir())) == 1


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    c = config(f"--log-jsonl {tmp_path}/log.jsonl")
    with open_recorder(c, echo=_ignore) as recorder:
        for k in (1, 2, 3):
            recorder.iteration(record(k))
    with open_recorder(c, start_iteration=1, echo=_ignore) as recorder:
        recorder.iteration(record(2, losses={"lm loss": 0.5}))
    assert [(o["iteration"], o["lm loss"]) for o in read(tmp_path / "log.jsonl")] == [
        (1, 4.0),
        (2, 0.5),
    ]


def test_the_other_workers_record_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    c = config(f"--log-interval 1 --log-jsonl {tmp_path}/log.jsonl")
    with open_recorder(c, active=False) as recorder:
        recorder.iteration(record(1))
        recorder.validation(validation(1))
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_lines_go_to_the_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with open_recorder(config("--log-interval 1")) as recorder:
        recorder.iteration(record(1))
        recorder.say("a word")
    assert re.fullmatch(
        r" iteration +1/ +20 \| lm loss: 4.0000 \|.* ETA: 10 s\na word\n", capsys.readouterr().out
    )


def test_the_log_file_gets_all_lines_in_full_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.txt"
    for k in (1, 2):
        c = config(f"--log-interval 1 --log-file {path}")
        with open_recorder(c, start_iteration=k - 1, echo=_ignore) as recorder:
            recorder.note(dump(c))
            recorder.say("a word")
            recorder.iteration(record(k))
            recorder.validation(validation(k))
    lines = path.read_text().splitlines()
    size = len(dump(c).splitlines())
    assert len(lines) == 2 * (size + 5)
    assert (lines[0][24:34], lines[size]) == (" arguments", "a word")
    assert "] iteration        1/      20 | consumed samples:" in lines[size + 1]
    assert lines[size + 3].startswith(" validation loss at iteration 1 | lm loss value: 2.0")
    assert "] iteration        2/      20 |" in lines[2 * size + 6]


def test_a_log_file_that_is_not_ours_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("a note\n")
    with pytest.raises(TelemetryError, match=r"--log-file .*notes.txt exists and is not a log"):
        open_recorder(config(f"--log-file {path}"))
    assert path.read_text() == "a note\n"


@pytest.mark.parametrize("limit", [0, 50, 1000])
def test_a_disk_that_fills_up_costs_the_logs_and_not_the_run(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    c = config(
        f"--log-interval 1 --log-file {tmp_path}/log.txt --log-jsonl {tmp_path}/log.jsonl"
        f" --tensorboard-dir {tmp_path}/board --tensorboard-queue-size 1"
    )
    recorder = open_recorder(c, echo=lines.append)
    recorder.note(dump(c))
    recorder.iteration(record(1))
    disk.fill(monkeypatch, limit)
    for k in range(2, 6):
        recorder.iteration(record(k))
    monkeypatch.undo()
    recorder.close()
    warned = [line.split(" cannot be written: ")[0] for line in lines if "warning" in line]
    assert sorted(warned) == [
        f" warning: --log-file {tmp_path}/log.txt",
        f" warning: --log-jsonl {tmp_path}/log.jsonl",
        f" warning: --tensorboard-dir {next((tmp_path / 'board').iterdir())}",
    ]
    assert sum(line.startswith(" iteration ") for line in lines) == 5
    done = [o["iteration"] for o in read(tmp_path / "log.jsonl")]
    assert done == list(range(1, len(done) + 1))
    for name in ("log.txt", "log.jsonl"):
        assert (tmp_path / name).read_text().endswith("\n"), "a part of a line is left"
    assert {1} <= {step for step, _ in series(tmp_path / "board")["lm loss"]}


def test_a_log_file_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TelemetryError, match=f"--log-file {tmp_path} cannot be written"):
        open_recorder(config(f"--log-file {tmp_path}"))


def test_a_run_ends_with_a_summary(tmp_path: Path) -> None:
    c = config(
        f"--save {tmp_path}/c --tensorboard-dir {tmp_path}/my(board) --log-jsonl {tmp_path}/j"
    )
    plans = ["0:5@0 | 5:10@1", "0:5@0 | 5:10@1 ; recompute 1", "0:10@0", "0:5@0 | 5:10@1"]
    with open_recorder(c, echo=_ignore) as recorder:
        for k, plan in enumerate(plans, 1):
            recorder.iteration(record(k, plan=plan, losses={"lm loss": float(5 - k)}))
        recorder.validation(validation(4))
        recorder.validation(validation(4, test=True, losses={"lm loss": 1.5}))
        lines = list(recorder.summary(c, 4))
    assert lines[1] == (
        " trained: 4 iterations, up to iteration 4 of 20; 4,000 tokens in 2 s (2,000 tokens/s)"
    )
    assert lines[2].startswith(" lm loss: 1.5000, from 3.5000 (means of the last and the first 2 ")
    assert lines[3:] == [
        " validation lm loss: 2.0000",
        " test lm loss: 1.5000",
        " plans: 2; switches: 2",
        f" checkpoint: iteration 4 in {tmp_path}/c",
        f" every iteration as JSON: {tmp_path}/j",
        f" curves: tensorboard --logdir '{tmp_path}/my(board)'",
    ]


def _ignore(_: str) -> None:
    """Prints nothing."""


class _Run:
    """What a run of Weights & Biases is asked for."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((values, step))

    def finish(self) -> None:
        self.finished = True


def test_weights_and_biases_gets_the_same_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = _Run(), {}

    def init(**arguments: Any) -> _Run:
        asked.update(arguments)
        return run

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    c = config(
        f"--wandb-project p --wandb-exp-name e --wandb-entity o --save {tmp_path} --save-interval 5"
        " --tensorboard-log-interval 2"
    )
    with open_recorder(c, echo=_ignore) as recorder:
        recorder.iteration(record(1))
        recorder.iteration(record(2))
        recorder.validation(validation(2))
    assert (asked["project"], asked["name"], asked["entity"]) == ("p", "e", "o")
    assert asked["dir"] == str(tmp_path / "wandb")
    assert Path(asked["dir"]).is_dir()
    assert asked["config"]["num_layers"] == 4
    (train, step), (valid, _) = run.rows
    assert step == 2
    assert (train["samples vs steps"], train["lm loss"], train["grad-norm"]) == (32, 4.0, 1.25)
    assert valid == {"lm loss validation": 2.0}
    assert run.finished


def test_weights_and_biases_without_its_package_is_one_clear_error(tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    c = config(f"--wandb-project p --wandb-exp-name e --wandb-save-dir {tmp_path}")
    with pytest.raises(TelemetryError, match="--wandb-project needs the wandb package"):
        open_recorder(c)
