"""What a worker needs at least, before anything is allocated."""

from __future__ import annotations

import pytest

from megatron_flex.loop.memory import MemoryLimitError, check_memory, device_bytes
from megatron_flex.planner.plan import Plan
from tests.unit.planner.instances_real import small_model

MODEL = small_model(4)
UNITS = MODEL.layers.num_units
PLAN = Plan.parse(f"0:{UNITS}@0,1")


def test_state_on_the_host_or_split_over_replicas_is_not_all_on_the_device() -> None:
    whole = device_bytes(MODEL, PLAN, 0, 0)
    split = device_bytes(MODEL, PLAN.sharded(), 0, 0)
    away = device_bytes(MODEL, Plan.parse(f"{PLAN} ; optimizer 0-{UNITS - 1}"), 0, 0)
    assert away < split < whole
    # In bfloat16 12 of 18 bytes a parameter are optimizer state.
    assert split / whole == pytest.approx(12 / 18, rel=1e-6)


def test_a_run_that_fits_only_with_split_state_is_refused_without_it() -> None:
    memory = device_bytes(MODEL, PLAN.sharded(), 0, 100)
    check_memory(MODEL, PLAN.sharded(), None, 100, memory)
    with pytest.raises(MemoryLimitError, match="--use-distributed-optimizer"):
        check_memory(MODEL, PLAN, None, 100, memory)
