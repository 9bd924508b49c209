"""Courses of an iteration, from a trace and made anew."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.cluster.cluster import description, load
from megatron_flex.data.cut import Cut
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.planner.messages import Setup
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.report.gantt import (
    Gantt,
    Replanner,
    Span,
    actual,
    chosen,
    encoded,
    planned_in_trace,
    same_operations,
    shares,
)
from megatron_flex.report.read import read_trace
from megatron_flex.schedule.instructions import (
    Backward,
    Compute,
    Forward,
    GlobalNorm,
    Instruction,
    RecvActivation,
    SendActivation,
    UpdateOrSkip,
)
from megatron_flex.telemetry.trace import TraceWriter, join
from tests.unit.planner.instances_real import small_model
from tests.unit.report.records import ONE, iteration

DONE: dict[int, list[tuple[Instruction, float, float]]] = {
    0: [(Forward(0, 0), 10.0, 12.0), (SendActivation(0, 0, 1, 8), 12.0, 12.5),
        (GlobalNorm(), 12.5, 20.0), (UpdateOrSkip(0), 20.0, 21.0)],
    1: [(RecvActivation(0, 0, 0, 8), 10.0, 13.0), (Forward(0, 1), 13.0, 16.0),
        (Backward(0, 1), 16.0, 19.0), (GlobalNorm(), 19.0, 20.0), (UpdateOrSkip(1), 20.0, 22.0)],
}  # fmt: skip


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    for rank, spans in DONE.items():
        writer = TraceWriter(str(path), rank)
        about = {"plan": "0:4@0 | 4:8@1", "tokens": (8,), "schedule": "1f1b"}
        planned = {i: (a - 10.0, b - 10.0) for i, a, b in spans if isinstance(i, Compute)}
        writer.add(3, spans, None if rank else about, planned)
        writer.close()
    join(path)
    return read_trace(path)[3]


def test_a_receive_waits_until_the_message_is_sent_and_then_for_the_message(
    events: list[dict[str, Any]],
) -> None:
    found = actual(events)
    assert found.seconds == pytest.approx(12.0)
    assert found.tokens == (8,)
    wait, message = (s for s in found.spans if s.worker == 1 and s.kind in (4, 5))
    assert (wait.kind, message.kind) == (4, 5)
    assert (wait.start, wait.stop) == pytest.approx((0.0, 2.0))
    assert (message.start, message.stop) == pytest.approx((2.0, 3.0))
    means = shares(found)
    assert means.compute == pytest.approx((2 + 6) / 2)
    assert means.bubble == pytest.approx(2 / 2)
    assert means.message == pytest.approx((1 + 0.5) / 2)
    assert means.norm == pytest.approx((7.5 + 1) / 2)
    assert means.update == pytest.approx((1 + 2) / 2)


def test_the_planned_course_of_a_trace_has_the_same_operations(
    events: list[dict[str, Any]],
) -> None:
    planned = planned_in_trace(events)
    assert planned is not None
    assert same_operations(planned, actual(events))
    assert planned.seconds == pytest.approx(9.0)
    assert planned_in_trace([e for e in events if e["ph"] == "M"]) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.floats(0, 50), st.floats(0.01, 9)),
        min_size=1,
        max_size=30,
    )
)
def test_what_is_packed_is_there_again(rows: list[tuple[int, int, float, float]]) -> None:
    spans = tuple(Span(w, k, w, k, start, start + length) for w, k, start, length in rows)
    packed = Gantt(spans, (5, 6), ((0, 1),)).packed()
    text = encoded(packed)
    assert json.loads(zlib.decompress(base64.b64decode(text))) == packed
    start, found = 0, []
    for w, k, t, length in zip(packed["w"], packed["k"], packed["t"], packed["l"], strict=True):
        start += t
        found.append((w, k, start * packed["u"], (start + length) * packed["u"]))
    longest = max(s.stop for s in spans)
    expected = sorted(spans, key=lambda s: (s.worker, s.start, s.kind))
    for (w, k, a, b), span in zip(found, expected, strict=True):
        assert (w, k) == (span.worker, span.kind)
        assert a == pytest.approx(span.start, abs=longest * 1e-5)
        assert b == pytest.approx(span.stop, abs=longest * 2e-5)


def setup() -> Setup:
    cut = Cut(by_cost=True, sliced=True, cost=CostCoefficients(1.0, 0.01))
    return Setup(small_model(3), description(load("cpux2")), None, PlannerOptions(), cut, ONE)


def test_programs_are_made_again_from_what_a_run_begins_with() -> None:
    data = json.loads(json.dumps(setup().to_json()))
    record = iteration(1, lengths=[100, 20, 30, 90])
    found = Replanner(data).gantt(record)
    assert {s.worker for s in found.spans} == {0, 1}
    forwards = [s for s in found.spans if s.kind == 0]
    assert {(s.stage, s.micro_batch) for s in forwards} == {
        (stage, m) for stage in (0, 1) for m in range(len(found.tokens))
    }
    assert sum(found.tokens) == 240
    assert found.chains, "a sample of 100 tokens is cut by 64"
    moved = Replanner(data).gantt(record, following=ONE)
    assert sum(s.stop - s.start for s in moved.spans if s.kind < 4) > 0


def test_iterations_are_chosen_with_the_last_and_the_first_and_the_switches() -> None:
    records = [iteration(k, predicted=100.0 if k != 40 else 1.0) for k in range(1, 101)]
    found = chosen(records, [20, 60], 20)
    assert found[:2] == [99, 0]
    assert {19, 18, 59, 58, 39} <= set(found)
    assert len(found) == len(set(found)) == 20
    assert chosen(records[:3], [], 20) == [2, 0, 1]
