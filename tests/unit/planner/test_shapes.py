"""Plans in a V, and whole servers on large clusters."""

from __future__ import annotations

import pytest

from megatron_flex.planner.plan import Plan
from tests.unit.planner.instances_real import drawn_batch, small_model, small_planner


def test_plans_in_a_v_are_considered_and_beat_straight_ones_where_they_should() -> None:
    # Whole layers, a head worth more than a layer, few devices: straight cuts are coarse.
    config = small_model(5)
    batch = drawn_batch(3, samples=64)
    straight = small_planner(4, config=config, unit="layer", simulations=4)
    both = small_planner(4, config=config, unit="layer", simulations=8, schedule="zb")
    one, other = straight.decide([batch], None), both.decide([batch], None)
    assert other.predicted.seconds <= one.predicted.seconds * (1 + 1e-9)
    finder = both.finder([batch])
    shapes = [[s.group for s in c.plan.stages] for c in finder.searched(None)]
    assert any(groups.count(g) == 2 for groups in shapes for g in groups)


def test_on_a_large_cluster_groups_are_whole_servers() -> None:
    small, large = small_planner(8), small_planner(8, server_groups_above=4)
    assert (small.elements.granule, large.elements.granule) == (1, 4)
    batch = drawn_batch(1, samples=64)
    decision = large.decide([batch], None)
    assert all(len(s.group) % 4 == 0 for s in decision.plan.stages)
    # Any other plan can still be priced.
    odd = Plan.parse("0:6@0-2 | 6:14@3-7")
    ours, theirs = (p.finder([batch]).pricers[0].price(odd) for p in (large, small))
    assert ours.seconds == pytest.approx(theirs.seconds)
