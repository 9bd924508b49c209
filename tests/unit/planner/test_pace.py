"""How many simulations a decision may take."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_flex.loop.cores import crowding, planning_part
from megatron_flex.planner.pace import CROWDED_PART, LEAST, MOST, PART, START, WEIGHT, Pace


@pytest.mark.parametrize("part", [PART, CROWDED_PART])
def test_as_many_as_fit_into_a_part_of_the_iteration(part: float) -> None:
    pace = Pace(part)
    assert pace.simulations(2.0) == round(part * 2.0 * START)
    pace.took(1001, 2.02, before=0.02)  # 500.5 a second, and 0.02 s before any
    assert pace.simulations(2.0) == round((part * 2.0 - 0.02) * 500.5)
    pace.took(300, 1.04, before=0.04)  # 300 a second
    rate, before = 500.5 + WEIGHT * (300 - 500.5), 0.02 + WEIGHT * 0.02
    assert pace.simulations(2.0) == round((part * 2.0 - before) * rate)
    assert pace.simulations(1e-6) == LEAST
    assert pace.simulations(1e6) == MOST


def test_what_tells_nothing_of_the_rate_leaves_it() -> None:
    pace = Pace()
    pace.took(1, 0.5)
    pace.took(10, 0.2, before=0.3)
    assert pace.simulations(1.0) == Pace().simulations(1.0)


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
def test_training_keeps_cores_that_it_fills(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert planning_part(2) == (PART if cores > 2 else CROWDED_PART)
    assert crowding(2) == max(1.0, 2 / cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # two servers
    assert planning_part(2) == (PART if cores > 1 else CROWDED_PART)
