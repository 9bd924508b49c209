"""Micro-batches go to one replica of each stage, balanced and paired stably."""

from __future__ import annotations

import random

import pytest
from hypothesis import given

from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.routing import check_route, partition, route
from tests.unit.schedule.strategies import SEEDS, Case, cases


def sized(plan: Plan, sizes: list[float]) -> OpCosts:
    return OpCosts.scaled([s.stop - s.start for s in plan.stages], sizes)


@given(cases())
def test_every_micro_batch_has_one_holder_of_every_stage(case: Case) -> None:
    table = route(case.plan, case.costs)
    check_route(case.plan, table, case.costs.num_micro_batches)
    assert table == route(case.plan, case.costs)


@given(SEEDS)
def test_the_fullest_replica_is_within_four_thirds_of_the_least_possible(seed: int) -> None:
    rng = random.Random(seed)
    parts = rng.randint(1, 5)
    work = [rng.lognormvariate(0, 1) for _ in range(rng.randint(1, 40))]
    loads = [0.0] * parts
    for seconds, part in zip(work, partition(work, parts), strict=True):
        loads[part] += seconds
    least = max(max(work), sum(work) / parts)
    # Graham: longest first is within 4/3 - 1/(3m) of the optimum, itself at least `least`; with
    # `least` in its place the bound needs one more micro-batch.
    assert max(loads) <= least + max(w for w in work if w <= least)
    assert sum(loads) == pytest.approx(sum(work))


def test_equal_micro_batches_are_dealt_in_turn() -> None:
    assert partition([1.0] * 7, 3) == (0, 1, 2, 0, 1, 2, 0)


def test_balance_is_by_cost_not_by_count() -> None:
    plan = Plan.parse("0:4@0,1")
    table = route(plan, sized(plan, [4000.0] + [20.0] * 200))
    alone = table[0][0]
    assert [d for d in table[0][1:] if d == alone] == []


def test_a_micro_batch_stays_on_its_device_through_a_v() -> None:
    plan = Plan.parse("0:2@0,1 | 2:3@2,3 | 3:4@2,3 | 4:8@0,1")
    table = route(plan, sized(plan, [3, 1, 4, 1, 5, 9, 2, 6]))
    assert table[0] == table[3]
    assert table[1] == table[2]


def test_replicas_are_paired_between_stages_of_equal_degree() -> None:
    plan = Plan.parse("0:2@0,1,2 | 2:4@3 | 4:8@6,4,5")
    table = route(plan, sized(plan, [3, 1, 4, 1, 5, 9, 2, 6, 5]))
    pairs = set(zip(table[0], table[2], strict=True))
    assert len(pairs) == 3


def test_a_device_in_both_of_two_groups_keeps_its_micro_batches() -> None:
    plan = Plan.parse("0:4@0,1 | 4:8@1,2")
    table = route(plan, sized(plan, [3, 1, 4, 1, 5, 9]))
    assert {m for m in range(6) if table[0][m] == 1} == {m for m in range(6) if table[1][m] == 1}


def test_costs_for_another_plan_are_refused() -> None:
    with pytest.raises(ValueError, match="has 2 stages, the costs are for 3"):
        route(Plan.parse("0:4@0 | 4:8@1"), OpCosts.uniform(3, 4))


def test_a_route_to_a_stranger_is_refused() -> None:
    plan = Plan.parse("0:4@0 | 4:8@1")
    with pytest.raises(ValueError, match="stage 1 to device 0, which does not hold it"):
        check_route(plan, ((0, 0), (1, 0)), 2)
    with pytest.raises(ValueError, match="names 1 micro-batches of 2"):
        check_route(plan, ((0, 0), (1,)), 2)
    with pytest.raises(ValueError, match="has 1 stages, the plan 2"):
        check_route(plan, ((0, 0),), 2)
