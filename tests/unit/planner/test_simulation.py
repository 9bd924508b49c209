"""The prediction's seconds alone are those of the whole prediction, bit for bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flex.planner.build import Batch
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.planner.simulation import predict, simulated
from tests.unit.planner.instances_real import small_planner


def any_plan(r: np.random.Generator, units: int, devices: int) -> Plan:
    """Straight, in a V, or of general form, on any number of the devices."""
    used = r.permutation(devices)[: int(r.integers(1, devices + 1))]
    groups = np.array_split(used, int(r.integers(1, len(used) + 1)))
    shape = int(r.integers(3))
    if shape == 1 and 2 * len(groups) <= units:
        groups = groups + groups[::-1]
    elif shape == 2:
        groups = groups + groups[:1]
    groups = groups[:units]
    cuts = np.sort(r.choice(np.arange(1, units), len(groups) - 1, replace=False))
    ends = [0, *map(int, cuts), units]
    stages = zip(ends[:-1], ends[1:], groups, strict=True)
    return Plan(tuple(Stage(a, b, tuple(map(int, g))) for a, b, g in stages))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    schedule=st.sampled_from(["zb", "1f1b", "auto", "gpipe"]),
    sharded=st.booleans(),
)
def test_seconds_alone(seed: int, schedule: str, sharded: bool) -> None:
    """Straight plans, Vs and plans of general form; a stop above them changes nothing."""
    r = np.random.default_rng(seed)
    planner = small_planner(4, schedule=schedule, shard_optimizer=sharded)
    costs = planner.units
    plan = any_plan(r, costs.layers.num_units, 4)
    tokens = r.integers(1, 500, int(r.integers(1, 9))).astype(float)
    one = Batch(tokens, tokens * r.uniform(1, 60, len(tokens)))
    whole = predict(costs, plan, one)
    assert whole is not None
    alone = simulated(costs, plan, one)
    assert alone is not None
    seconds, placed = alone
    assert seconds == whole.seconds
    assert (placed.schedule, placed.placement) == (whole.schedule, whole.placement)
    again = simulated(costs, plan, one, stop=whole.seconds * 1.001)
    assert again is not None
    assert (again[0], again[1].placement) == (seconds, placed.placement)
    assert simulated(costs, plan, one, stop=whole.seconds) is None
