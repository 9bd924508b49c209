"""What the operations of slices cost: as much as those of whole samples, elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flex.data.cut import Cut
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.planner.build import Batch
from megatron_flex.planner.memory import chain_bytes
from megatron_flex.planner.plan import OPlan
from megatron_flex.planner.simulation import op_costs, static_bytes
from megatron_flex.planner.ways import batch_of
from megatron_flex.schedule.costs import TABLES
from tests.unit.planner.instances_real import small_planner
from tests.unit.planner.test_simulation import any_plan

CUT = Cut(by_cost=True, sliced=True, cost=CostCoefficients(1.0, 1e-3))


def sliced_batch(r: np.random.Generator) -> Batch:
    lengths = r.integers(1, 300, int(r.integers(1, 12))).tolist()
    return batch_of(CUT, (1500, *lengths), int(r.integers(100, 700)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_a_slice_s_head_runs_back_in_its_forward(seed: int, recompute: bool) -> None:
    r = np.random.default_rng(seed)
    costs = small_planner(4, schedule="zb").units
    plan, batch = any_plan(r, costs.layers.num_units, 4), sliced_batch(r)
    if recompute:
        units = sorted(r.choice(range(1, costs.layers.num_units - 1), 3, replace=False).tolist())
        plan = replace(plan, o_plan=OPlan(recompute=tuple(units)))
    whole = replace(batch, chains=(), sliced=np.zeros(0))
    tables = (op_costs(costs, plan, b) for b in (batch, whole))
    found, before = ({name: getattr(t, name) for name in TABLES} for t in tables)
    names = ("forward", "backward_input", "backward_weight")
    for name in names:
        assert (found[name] >= 0).all()
        np.testing.assert_array_equal(found[name][:-1], before[name][:-1])
    together, apart = (sum(t[n] for n in names) for t in (found, before))
    np.testing.assert_allclose(together, apart, rtol=1e-12)
    cut = batch.sliced > 0
    basis = np.stack([np.ones_like(batch.tokens), batch.tokens, batch.squares])
    head = costs.backward[:, -1] @ basis
    moved = found["forward"][-1] - before["forward"][-1]
    np.testing.assert_allclose(moved, head * cut, rtol=1e-9, atol=1e-15)
    spared = costs.activation[-1] - costs.profile.boundary
    np.testing.assert_allclose(
        before["activation"][-1] - found["activation"][-1], spared * batch.tokens * cut, rtol=1e-9
    )


@given(st.integers(0, 2**32 - 1))
def test_chains_hold_their_keys_and_values_on_every_stage(seed: int) -> None:
    r = np.random.default_rng(seed)
    costs = small_planner(4, schedule="zb").units
    plan, batch = any_plan(r, costs.layers.num_units, 4), sliced_batch(r)
    each = chain_bytes(costs.config)
    held = op_costs(costs, plan, batch).chain_bytes.sum()
    total = batch.sliced.sum() * (each.keys_values + each.gradients) * costs.config.num_layers
    assert np.isclose(held, total)
    whole = replace(batch, chains=(), sliced=np.zeros(0))
    more = np.array(static_bytes(costs, plan, batch)) - np.array(static_bytes(costs, plan, whole))
    assert (more >= 0).all()
    assert {d for d in range(4) if more[d] > 0} <= set(plan.stages[-1].group)
