from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_flex.schedule.instructions import (
    Forward,
    RecvState,
    ReduceGradient,
    SendActivation,
    UpdateOrSkip,
)
from megatron_flex.telemetry.sink import TelemetryError
from megatron_flex.telemetry.trace import TraceWriter, join, line_of, parts_of, resume


def test_a_trace_has_a_row_a_worker_and_every_instruction(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "trace.json"
    for rank in range(2):
        writer = TraceWriter(str(path), rank)
        writer.add(3, [(Forward(1, rank), 1.0, 1.5), (UpdateOrSkip(4), 2.0, 2.25)])
        writer.close()
    join(path)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e.get("ph") == "X"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in spans] == [
        (0, "Forward", 1e6, 0.5e6),
        (0, "UpdateOrSkip", 2e6, 0.25e6),
        (1, "Forward", 1e6, 0.5e6),
        (1, "UpdateOrSkip", 2e6, 0.25e6),
    ]
    assert spans[0]["args"] == {"iteration": 3, "what": "micro_batch=1 stage=0"}
    assert {e["args"]["name"] for e in events if e.get("name") == "process_name"} == {
        "worker 0",
        "worker 1",
    }
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"], "parts are left behind"


def test_transfers_have_lines_of_their_own() -> None:
    lines = [
        line_of(i)
        for i in (Forward(0, 0), SendActivation(0, 0, 1, 5), ReduceGradient(0, (0, 1)),
                  RecvState(3, 1))
    ]  # fmt: skip
    assert lines == [0, 1, 2, 3]


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TelemetryError, match="--flexpipe-trace"):
        TraceWriter(str(tmp_path / "file" / "trace.json"), 0)


def write(path: Path, iterations: list[int], clock: float, workers: int) -> None:
    """Two seconds an iteration on a clock that began at ``clock``; nothing is joined."""
    for rank in range(workers):
        writer = TraceWriter(str(path), rank)
        for k in iterations:
            about = {"plan": "0:8@0"} if rank == 0 else None
            writer.add(k, [(Forward(k, 0), clock + 2 * k, clock + 2 * k + 1)], about)
        writer.close()


def spans_of(path: Path) -> list[tuple[int, int, float]]:
    events = json.loads(path.read_text())["traceEvents"]
    return sorted(
        (e["pid"], e["args"]["iteration"], e["ts"] / 1e6) for e in events if e.get("ph") == "X"
    )


def test_a_resumed_run_goes_on_in_the_same_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert resume(path, 0) is None
    write(path, [1, 2, 3], 100.0, 2)
    join(path)
    assert resume(path, 2) == (
        "--flexpipe-trace: iterations after 2, which are trained again, were removed"
    )
    # Killed: its parts are not joined. The machine has been started again, the clock too.
    write(path, [3, 4, 5], 0.0, 3)
    torn = parts_of(path)[1]
    torn.write_bytes(torn.read_bytes() + b'{"name": "Forw')
    resume(path, 4)
    assert parts_of(path) == []
    write(path, [5], 200.0, 1)
    join(path)
    # The second run began at 6 s of its clock, where the first had reached 105 s.
    assert spans_of(path) == [
        (0, 1, 102.0), (0, 2, 104.0), (0, 3, 105.0), (0, 4, 107.0), (0, 5, 210.0),
        (1, 1, 102.0), (1, 2, 104.0), (1, 3, 105.0), (1, 4, 107.0),
        (2, 3, 105.0), (2, 4, 107.0),
    ]  # fmt: skip
    events = json.loads(path.read_text())["traceEvents"]
    known = [e["args"]["iteration"] for e in events if e.get("name") == "iteration"]
    assert known == [1, 2, 3, 4, 5]
    names = [e["pid"] for e in events if e.get("name") == "process_name"]
    assert sorted(names) == [0, 1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_a_run_that_starts_anew_keeps_the_trace_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, [1], 0.0, 2)  # killed
    assert resume(path, 0) == f"--flexpipe-trace: the trace of an earlier run is now {path}.1"
    assert spans_of(tmp_path / "trace.json.1") == [(0, 1, 2.0), (1, 1, 2.0)]
    assert not path.exists()


@pytest.mark.parametrize("content", [b"[]", b'{"traceEvents": []}', b"0:8@0\n", b"{"])
def test_a_file_that_is_not_ours_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TelemetryError, match=r"--flexpipe-trace .* exists and is not a trace"):
        resume(path, 0)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("trace.json", content)]
