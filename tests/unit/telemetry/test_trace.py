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
from megatron_flex.telemetry.trace import TraceWriter, join, line_of


def test_a_trace_has_a_row_a_worker_and_every_instruction(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "trace.json"
    for rank in range(2):
        writer = TraceWriter(str(path), rank)
        writer.add(3, [(Forward(1, rank), 1.0, 1.5), (UpdateOrSkip(4), 2.0, 2.25)])
        writer.close()
    join(str(path), 2)
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
