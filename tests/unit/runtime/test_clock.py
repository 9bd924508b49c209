"""Gaps between iterations: what counts as one, and what does not."""

from __future__ import annotations

import time

import pytest
import torch

from megatron_flex.runtime.clock import Clock
from megatron_flex.schedule.instructions import (
    Forward,
    Instruction,
    RecvActivation,
    UpdateOrSkip,
)

STEP = 0.02


def took(clock: Clock, instruction: Instruction, seconds: float) -> None:
    started = clock.start(instruction)
    time.sleep(seconds)
    clock.stop(instruction, started)


def updated() -> Clock:
    clock = Clock(torch.device("cpu"))
    clock.begin()
    took(clock, UpdateOrSkip(0), 0.0)
    return clock


def test_the_wait_for_another_stage_is_no_gap() -> None:
    clock = updated()
    time.sleep(STEP)
    clock.begin()
    took(clock, RecvActivation(0, 0, 0, 8), 5 * STEP)
    took(clock, Forward(0, 1), STEP)
    took(clock, RecvActivation(1, 0, 0, 8), STEP)
    measured = clock.measured()
    assert STEP <= measured.gap < 4 * STEP
    assert measured.busy == pytest.approx(STEP, rel=0.9)


def test_the_wait_for_late_state_is_gap_and_not_work() -> None:
    clock = updated()
    clock.begin()
    started = clock.start(Forward(0, 0))
    time.sleep(2 * STEP)
    clock.waited(2 * STEP)
    clock.stop(Forward(0, 0), started)
    measured = clock.measured()
    assert measured.gap >= 2 * STEP
    assert measured.busy < STEP


def test_a_device_without_work_has_no_gap() -> None:
    clock = updated()
    clock.begin()
    assert clock.measured().gap == 0.0
