from __future__ import annotations

import numpy as np
import pytest

from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.loop.measures import (
    MemoryMeasure,
    StallMeter,
    bubble,
    lists_of,
    memory_ratio,
    times_of,
)
from megatron_flex.runtime.clock import Measured
from megatron_flex.telemetry.record import LENGTHS_LISTED


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


def test_times_are_means_over_the_devices_that_compute() -> None:
    measured = (
        Measured(0.0, 3.0, 4.0, receive=0.5, send=0.1, reduce=0.2, update=0.3, reading=0.03),
        Measured(0.0, 1.0, 3.0, receive=1.5, send=0.3, state=0.4, update=0.1, reading=0.01),
        Measured(0.0, 0.0, 3.9),
    )
    found = times_of(measured)
    assert found == pytest.approx(
        {
            "seconds-to-norm": 4.0,
            "seconds-compute": 2.0,
            "seconds-balanced": 4.0 / 3,
            "seconds-norm": 0.5,
            "seconds-receive": 1.0,
            "seconds-send": 0.2,
            "seconds-reduce": 0.1,
            "seconds-state": 0.2,
            "seconds-update": 0.2,
            "seconds-reading": 0.02,
        }
    )


def test_what_a_gpus_host_cannot_tell_is_left_out() -> None:
    assert set(times_of((Measured(0.0, 1.0, 2.0),))) == {
        "seconds-to-norm", "seconds-compute", "seconds-balanced", "seconds-norm"
    }  # fmt: skip
    assert times_of((Measured(0.0, 0.0, 2.0),)) == {}


def test_lists_have_each_sample_and_each_device() -> None:
    batch = GlobalBatch(0, np.array([30, 10, 20, 40, 50]), (150,))
    found = lists_of(batch, (with_memory(5.4, 6.0), with_memory(0.0, 0.0)))
    assert found == {
        "length-quantiles": [10, 14, 20, 30, 40, 46, 50],
        "lengths": [30, 10, 20, 40, 50],
        "memory-by-worker": [5, 0],
        "memory-predicted-by-worker": [6, 0],
    }
    large = GlobalBatch(0, np.full(LENGTHS_LISTED + 1, 7), (1,))
    assert lists_of(large, (Measured(0.0, 1.0, 1.0),)) == {"length-quantiles": [7] * 7}
