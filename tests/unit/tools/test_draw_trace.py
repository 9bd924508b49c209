"""``tools/draw_schedule.py --trace``: an iteration as planned, and as it went."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_flex.planner.package import computes
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.instructions import Backward, Forward, Instruction
from megatron_flex.telemetry.trace import TraceWriter, join
from tools import draw_schedule

PLAN = Plan.parse("0:4@0 | 4:8@1")
# Seconds of a run with two micro-batches; worker 1 starts late.
DONE: dict[int, list[tuple[Instruction, float, float]]] = {
    0: [(Forward(0, 0), 10.0, 11.0), (Forward(1, 0), 11.0, 12.0), (Backward(0, 0), 15.0, 17.0),
        (Backward(1, 0), 18.0, 20.0)],
    1: [(Forward(0, 1), 12.0, 13.0), (Backward(0, 1), 13.0, 15.0), (Forward(1, 1), 15.0, 16.0),
        (Backward(1, 1), 16.0, 18.0)],
}  # fmt: skip
# 1F1B: (m + p - 1) * (F + B), with F = 1 and B = 2.
PLANNED = {
    0: [(0.0, 1.0), (1.0, 2.0), (4.0, 6.0), (7.0, 9.0)],
    1: [(1.0, 2.0), (2.0, 4.0), (4.0, 5.0), (5.0, 7.0)],
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    about = {
        "plan": str(PLAN),
        "tokens": (5, 5),
        "schedule": "1f1b",
        "seconds": 9.0,
    }
    for rank, spans in DONE.items():
        writer = TraceWriter(str(path), rank)
        operations = computes([instruction for instruction, *_ in spans])
        planned = dict(zip(operations, PLANNED[rank], strict=True))
        writer.add(1, spans, about if rank == 0 else None, planned)
        writer.close()
    join(path)
    return path


def test_planned_and_actual_have_the_same_work_and_their_own_times(trace: Path) -> None:
    found = draw_schedule.planned_and_actual(trace, None)
    planned, actual = found["planned"], found["actual"]
    assert actual.makespan == pytest.approx(10.0)
    assert actual.mean_bubble == pytest.approx(1 - 12 / 20)
    assert sum(map(planned.busy, (0, 1))) == pytest.approx(12.0)
    assert planned.makespan == pytest.approx(9.0)
    assert all(map(np.array_equal, actual.order, planned.order))


def test_the_tool_draws_both(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.svg"
    assert draw_schedule.main(["--trace", str(trace), "--output", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("device 1 |") == 2
    assert {p.name for p in tmp_path.glob("*.svg")} == {"picture-planned.svg", "picture-actual.svg"}


def test_a_missing_iteration_is_an_error(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw_schedule.main(["--trace", str(trace), "--iteration", "9"]) == 2
    assert "it has iterations 1 to 1, not 9" in capsys.readouterr().err
