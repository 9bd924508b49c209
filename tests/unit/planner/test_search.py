"""The fast search against the oracle, and what every plan must keep."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_flex.planner.cost import plan_cost
from megatron_flex.planner.exhaustive import count_cuts, cuts, exhaustive
from megatron_flex.planner.native_search import SearchProblem, shares
from megatron_flex.schedule.routing import partition
from tests.unit.planner.instances import random_tables


def check_equal_cost(seed: int) -> None:
    tables = random_tables(seed)
    most = min(tables.num_devices, tables.num_elements)
    groups = 0 if seed % 3 else seed // 3 % most + 1  # any number, or at most so many
    fast = SearchProblem(tables).search(groups)
    slow = exhaustive(tables, groups)
    assert (fast is None) == (slow is None), seed
    if fast is None or slow is None:
        return
    assert fast.seconds == pytest.approx(slow.seconds, rel=1e-9), seed
    # What it says of its own plan is the plan's cost by the readable definition.
    assert plan_cost(tables, fast.groups).seconds == pytest.approx(fast.seconds, rel=1e-9)
    assert groups == 0 or len(fast.groups) <= groups


@pytest.mark.parametrize("block", range(8))
def test_equals_exhaustive_search(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        check_equal_cost(seed)
