from __future__ import annotations

import pytest

from megatron_flex.loop.measures import MemoryMeasure, StallMeter, bubble, memory_ratio
from megatron_flex.runtime.clock import Measured


def test_the_bubble_is_the_idle_share_of_the_devices_that_compute() -> None:
    measured = (Measured(0.0, 3.0, 4.0), Measured(0.0, 1.0, 3.5), Measured(0.0, 0.0, 4.0))
    assert bubble(measured) == pytest.approx(1 - (3 + 1) / (2 * 4))


def test_without_work_there_is_no_bubble() -> None:
    assert bubble((Measured(0.0, 0.0, 1.0),)) == 0.0


def test_a_stall_is_the_longest_gap_less_the_usual_one() -> None:
    meter = StallMeter()
    for gap in (0.01, 0.02, 0.03):
        assert meter.add((Measured(gap, 1.0, 1.0),), switched=False) is None
    measured = (Measured(0.05, 1.0, 1.0), Measured(0.12, 1.0, 1.0), Measured(9.0, 0.0, 1.0))
    assert meter.add(measured, switched=True) == pytest.approx(0.12 - 0.02)


def test_a_switch_without_a_pause_stalls_nothing() -> None:
    meter = StallMeter()
    meter.add((Measured(0.02, 1.0, 1.0),), switched=False)
    assert meter.add((Measured(0.01, 1.0, 1.0),), switched=True) == 0.0


def with_memory(memory: float, predicted: float) -> Measured:
    return Measured(0.0, 1.0, 1.0, memory, predicted)


def test_memory_is_that_of_the_fullest_device_and_the_budget_that_of_each() -> None:
    measure = MemoryMeasure(100.0)
    first = measure.add((with_memory(90.0, 91.0), with_memory(101.0, 99.0)))
    assert first == {
        "memory-measured": 101.0, "memory-predicted": 99.0, "memory-over-budget": 1.0
    }  # fmt: skip
    assert measure.add((with_memory(100.0, 0.0),))["memory-over-budget"] == 0.0
    assert measure.over == 1
    assert "memory-over-budget" not in MemoryMeasure(None).add((with_memory(1e9, 0.0),))
    assert MemoryMeasure(100.0).add((Measured(0.0, 1.0, 1.0),)) == {}


def test_the_ratio_of_memory_leaves_out_devices_that_are_far_from_full() -> None:
    rows = (with_memory(100.0, 99.0), with_memory(40.0, 20.0), with_memory(60.0, 55.0))
    assert memory_ratio(rows) == pytest.approx(60.0 / 55.0)
    assert memory_ratio((Measured(0.0, 1.0, 1.0),)) == 0.0


def test_what_plans_leave_room_for_is_no_error_of_the_prediction() -> None:
    assert memory_ratio((with_memory(110.0, 100.0),), room=15.0) == pytest.approx(1.0)
    assert memory_ratio((with_memory(110.0, 100.0),), room=4.0) == pytest.approx(1.06)
    assert memory_ratio((with_memory(90.0, 100.0),), room=15.0) == pytest.approx(0.9)
