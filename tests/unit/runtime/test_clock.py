"""Gaps between iterations: what counts as one, and what does not."""

from __future__ import annotations

import pytest
import torch

from megatron_flex.runtime import clock as module
from megatron_flex.runtime.clock import Clock
from megatron_flex.schedule.instructions import (
    Drop,
    Forward,
    Instruction,
    RecvActivation,
    RecvGradient,
    ReduceGradient,
    SendActivation,
    SquaredNorm,
    UpdateOrSkip,
)


class Watch:
    """Time that passes when a test says so, in whole seconds: sums of them are exact."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    found = Watch()
    monkeypatch.setattr(module, "time", found)
    return found


def took(clock: Clock, watch: Watch, instruction: Instruction, seconds: float) -> None:
    started = clock.start(instruction)
    watch.now += seconds
    clock.stop(instruction, started)


def updated(watch: Watch) -> Clock:
    clock = Clock(torch.device("cpu"))
    clock.begin()
    took(clock, watch, UpdateOrSkip(0), 1)
    return clock


def test_the_wait_for_another_stage_is_no_gap(watch: Watch) -> None:
    clock = updated(watch)
    watch.now += 2
    clock.begin()
    watch.now += 4
    took(clock, watch, RecvActivation(0, 0, 0, 8), 8)
    took(clock, watch, Forward(0, 1), 16)
    took(clock, watch, RecvActivation(1, 0, 0, 8), 32)
    took(clock, watch, Forward(1, 1), 64)
    measured = clock.measured()
    assert measured.gap == 2 + 4
    assert measured.busy == 16 + 64
    assert measured.elapsed == 4 + 8 + 16 + 32 + 64


def test_the_wait_for_late_state_is_gap_and_not_work(watch: Watch) -> None:
    clock = updated(watch)
    watch.now += 1
    clock.begin()
    started = clock.start(Forward(0, 0))
    watch.now += 2
    clock.waited(2)
    watch.now += 4
    clock.stop(Forward(0, 0), started)
    measured = clock.measured()
    assert measured.gap == 1 + 2
    assert measured.busy == 4


def test_a_device_without_work_has_no_gap(watch: Watch) -> None:
    clock = updated(watch)
    watch.now += 1
    clock.begin()
    assert clock.measured().gap == 0.0


def test_what_is_no_computing_is_told_apart(watch: Watch) -> None:
    clock = updated(watch)
    clock.begin()
    took(clock, watch, RecvActivation(0, 0, 0, 8), 2)
    took(clock, watch, Forward(0, 1), 4)
    took(clock, watch, SendActivation(0, 1, 2, 8), 8)
    took(clock, watch, RecvGradient(0, 2, 2, 8), 16)
    took(clock, watch, ReduceGradient(0, (0, 1)), 32)
    took(clock, watch, SquaredNorm(0), 64)
    took(clock, watch, Drop(3), 128)
    clock.waited(1)
    first = clock.measured()
    assert (first.receive, first.send, first.reduce) == (2 + 16, 8, 32 + 64)
    assert (first.state, first.update, first.busy) == (128 + 1, 1, 4 - 1)
    took(clock, watch, UpdateOrSkip(0), 256)
    took(clock, watch, UpdateOrSkip(1), 512)
    clock.begin()
    second = clock.measured()
    assert (second.receive, second.send, second.reduce, second.state) == (0, 0, 0, 0)
    assert second.update == 256 + 512


def test_an_evaluation_is_no_gap_and_hides_no_update(watch: Watch) -> None:
    clock = updated(watch)
    watch.now += 2
    for _ in range(2):
        clock.begin(training=False)
        took(clock, watch, RecvActivation(0, 0, 0, 8), 64)
        took(clock, watch, Forward(0, 0), 128)
    watch.now += 256
    clock.begin()
    watch.now += 4
    took(clock, watch, Forward(0, 0), 8)
    measured = clock.measured()
    assert measured.gap == 2 + 4
    assert measured.update == 1
    assert measured.receive == 0
