"""Records as JSON lines."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.telemetry.jsonl import JsonlSink, read
from megatron_flex.telemetry.record import RunRecord
from megatron_flex.telemetry.sink import TelemetryError
from tests.unit import disk
from tests.unit.telemetry.records import completion, record, validation

ROOT = Path(__file__).resolve().parents[3]


def write(path: Path, first: int, last: int, *, start: int = 0, loss: float = 1.0) -> None:
    sink = JsonlSink(path, start)
    for k in range(first, last + 1):
        sink.iteration(record(k, losses={"lm loss": loss}))
    sink.close()


def test_an_iteration_is_one_object(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "new" / "log.jsonl")
    sink.iteration(
        record(
            3,
            plan="0:5@0 | 5:10@1",
            memory={"mem-resident-bytes": 5.0},
            extra={"bubble": 0.25},
        )
    )
    sink.validation(validation(3))
    sink.validation(validation(3, test=True))
    sink.close()
    train, valid, test = read(tmp_path / "new" / "log.jsonl")
    assert train == {
        "event": "iteration",
        "iteration": 3,
        "consumed_samples": 48,
        "elapsed": 0.5,
        "lm loss": 4.0,
        "learning_rate": 1e-3,
        "global_batch_size": 16,
        "grad_norm": 1.25,
        "loss_scale": 1.0,
        "skipped": False,
        "tokens": 1000,
        "padding": 0,
        "tokens_per_second": 2000.0,
        "flops": 2e12,
        "plan": "0:5@0 | 5:10@1",
        "mem-resident-bytes": 5.0,
        "bubble": 0.25,
    }
    assert (valid["event"], valid["lm loss"], valid["samples"]) == ("validation", 2.0, 64)
    assert test["event"] == "test"


def test_a_run_says_what_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, 1, 3)
    sink = JsonlSink(path, 2)
    sink.run(RunRecord(2, 4, 10, 1000, None, {"switch": "live"}))
    sink.iteration(
        record(3, lists={"lengths": [5, 7]}, reason="A: it fits", notes={"action": "① keep"})
    )
    sink.close()
    about, last = read(path)[2:]
    assert about == {
        "event": "run", "iteration": 2, "workers": 4, "train_iters": 10, "parameters": 1000,
        "setup": {"switch": "live"}, "kind": "training",
    }  # fmt: skip
    assert (last["lengths"], last["reason"], last["action"]) == ([5, 7], "A: it fits", "① keep")


def test_numbers_that_are_not_finite_are_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    sink = JsonlSink(path)
    sink.iteration(record(1, losses={"lm loss": math.nan}, grad_norm=math.inf))
    sink.close()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    values = json.loads(path.read_text(), parse_constant=refuse)
    assert (values["lm loss"], values["grad_norm"]) == ("NaN", "Infinity")


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 12))
def test_a_resumed_run_replaces_the_iterations_that_it_repeats(
    written: int, resumed: int, last: int
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log.jsonl"
        resumed = min(resumed, written)
        write(path, 1, written, loss=1.0)
        write(path, resumed + 1, max(last, resumed), start=resumed, loss=2.0)
        rows = [(o["iteration"], o["lm loss"]) for o in read(path)]
        assert rows == [(k, 1.0) for k in range(1, resumed + 1)] + [
            (k, 2.0) for k in range(resumed + 1, last + 1)
        ]
        aside = ["log.jsonl.1"] if written and not resumed else []
        assert sorted(os.listdir(directory)) == ["log.jsonl", *aside]


def test_a_run_that_starts_anew_keeps_the_log_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for loss in (1.0, 2.0, 3.0):
        write(path, 1, 2, loss=loss)
    found = [[o["lm loss"] for o in read(tmp_path / f"log.jsonl{n}")] for n in (".1", ".2", "")]
    assert found == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    sink = JsonlSink(path)
    assert sink.notice == f"--log-jsonl: the log of an earlier run is now {path}.3"
    sink.close()


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "a document"}\n',
        b"a note",
        b"0:8@0\n",
        b'{"event": "iteration", "iteration": 1}\n{"a": 1}\n',
        b'{"event": "iteration", "iteration": 1}\nno record\n{"event": "it',
        b"\x93NUMPY\x01\x00v\x00",
    ],
)
def test_a_file_that_is_not_ours_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(TelemetryError, match=r"--log-jsonl .*log.jsonl exists and is not a log"):
        JsonlSink(path, 5)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["log.jsonl"]


def test_validations_of_repeated_iterations_are_replaced_too(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    sink = JsonlSink(path)
    for k in (1, 2, 3):
        sink.iteration(record(k))
        sink.validation(validation(k))
    sink.close()
    JsonlSink(path, 2).close()
    assert [(o["event"], o["iteration"]) for o in read(path)] == [
        ("iteration", 1),
        ("validation", 1),
        ("iteration", 2),
        ("validation", 2),
    ]


@pytest.mark.parametrize(
    "torn",
    [
        b'{"event": "itera',
        b'{"event": "iteration", "iteration": 2}',
        b'{"ev',
        b"\x00\x00\x00\n",
        b"\n",
    ],
)
def test_a_torn_line_is_removed(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log.jsonl"
    write(path, 1, 3)
    path.chmod(0o640)
    with path.open("ab") as file:
        file.write(torn)
    write(path, 4, 4, start=3)
    assert [o["iteration"] for o in read(path)] == [1, 2, 3, 4]
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_that_needs_no_change_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, 1, 3)
    inode = path.stat().st_ino
    write(path, 4, 5, start=3)
    assert path.stat().st_ino == inode


def test_a_killed_process_leaves_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    code = (
        "import sys, itertools\n"
        "from megatron_flex.telemetry.jsonl import JsonlSink\n"
        "from tests.unit.telemetry.records import record\n"
        "sink = JsonlSink(sys.argv[1])\n"
        "for k in itertools.count(1): sink.iteration(record(k))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (path.exists() and path.stat().st_size > 50_000):
            assert time.monotonic() < deadline, "the child wrote nothing for 60 s"
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=60)
    lines = path.read_bytes().splitlines(keepends=True)
    assert all(line.endswith(b"}\n") for line in lines)
    assert [o["iteration"] for o in read(path)] == list(range(1, len(lines) + 1))


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TelemetryError, match=r"--log-jsonl .*file/log.jsonl cannot be written: .*"):
        JsonlSink(tmp_path / "file" / "log.jsonl")


def test_a_line_that_fits_in_part_only_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = JsonlSink(tmp_path / "log.jsonl")
    sink.iteration(record(1))
    before = (tmp_path / "log.jsonl").read_bytes()
    left = disk.fill(monkeypatch, 25)
    with pytest.raises(TelemetryError, match="cannot be written: No space left on device"):
        sink.iteration(record(2))
    assert left == [0]
    assert (tmp_path / "log.jsonl").read_bytes() == before, "a part of a line is left"
    left[0] = 10**6
    sink.iteration(record(3))
    assert [o["iteration"] for o in read(tmp_path / "log.jsonl")] == [1, 3]


def test_a_full_disk_is_one_clear_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    sink = JsonlSink("/dev/null")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, sink._file._file)
    os.close(full)
    with pytest.raises(TelemetryError, match="No space left on device"):
        sink.iteration(record(1))
    sink.close()


def test_a_replaced_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    write(path, 1, 5)
    happened = disk.watch(monkeypatch)
    write(path, 4, 5, start=3)
    (what, synced), named = (h for h in happened if "trial" not in h[1])
    assert (what, named) == ("sync", ("name", str(path)))
    assert synced.startswith(f"{path.parent}/.{path.name}.new")


def test_a_completion_is_one_object(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "log.jsonl")
    sink.completions([completion(4), completion(4, ended=False)])
    sink.close()
    first, second = read(tmp_path / "log.jsonl")
    assert first == {
        "event": "completion", "iteration": 4, "consumed_samples": 64, "prompt": "def f(",
        "completion": "x):\n  pass", "tokens": 5, "ended": True,
    }  # fmt: skip
    assert second == {**first, "ended": False}
