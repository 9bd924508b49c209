"""The fast search against the oracle, and what every plan must keep."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_flex.planner.cost import Group, group_cost, plan_cost
from megatron_flex.planner.exhaustive import count_cuts, cuts, exhaustive
from megatron_flex.planner.native_search import SearchProblem, shares, v_steps
from megatron_flex.planner.optimise import optimise
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.planner.plans import groups_of, plan_of
from megatron_flex.planner.tables import Tables
from megatron_flex.schedule.routing import partition
from tests.unit.planner.instances import random_tables
from tests.unit.planner.instances_real import random_plan


def check_equal_cost(seed: int) -> bool:
    """Search and oracle agree; whether anything fits."""
    tables = random_tables(seed)
    most = min(tables.num_devices, tables.num_elements)
    groups = 0 if seed % 3 else seed // 3 % most + 1  # any number, or at most so many
    fast = SearchProblem(tables).search(groups)
    slow = exhaustive(tables, groups)
    assert (fast is None) == (slow is None), seed
    if fast is None or slow is None:
        return False
    assert fast.seconds == pytest.approx(slow.seconds, rel=1e-9), seed
    # What it says of its own plan is the plan's cost by the readable definition.
    assert plan_cost(tables, fast.groups).seconds == pytest.approx(fast.seconds, rel=1e-9), seed
    assert groups == 0 or len(fast.groups) <= groups
    return True


@pytest.mark.parametrize("block", range(4))
def test_equals_exhaustive_search(block: int) -> None:
    fits = [check_equal_cost(seed) for seed in range(block * 40, block * 40 + 40)]
    assert 10 < sum(fits) < 40  # memory is tight in some, loose in others


def test_what_saves_nothing_does_not_disturb_the_order_of_savings() -> None:
    assert check_equal_cost(3468)  # kinds without optimizer state or without activations


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_equals_exhaustive_search_on_many(block: int) -> None:
    for seed in range(1000 + block * 150, 1000 + block * 150 + 150):
        check_equal_cost(seed)


@pytest.mark.parametrize("seed", range(60))
def test_a_found_plan_keeps_the_budget_and_covers_every_unit_once(seed: int) -> None:
    tables = random_tables(seed, max_elements=30, max_devices=12)
    cut = SearchProblem(tables).search()
    if cut is None:
        return
    cost = plan_cost(tables, cut.groups)
    assert cost.fits
    plan = plan_of(tables, cut.groups)
    plan.check(tables.num_elements, tables.num_devices)
    held = [device for group in cut.groups for device in group.devices]
    assert len(held) == len(set(held))
    for group, terms in zip(cut.groups, cost.groups, strict=True):
        o = optimise(tables, group)
        budget = min(tables.budget[s] for s in group.devices)
        assert terms.bytes - o.recomputed - o.offloaded <= budget * (1 + 1e-12)
    assert groups_of(tables, plan) == cut.groups


@pytest.mark.parametrize("seed", range(40))
def test_costs_grow_with_inclusion_and_fall_with_a_later_start(seed: int) -> None:
    tables = random_tables(seed)
    last = tables.num_elements
    for first in range(tables.num_devices):
        for end in range(first + 1, min(tables.num_devices, first + tables.num_micro_batches) + 1):
            slots = tuple(range(first, end))
            cost = {
                (a, b): group_cost(tables, Group(((a, b),), slots)).seconds
                for a in range(last)
                for b in range(a + 1, last + 1)
            }
            for (a, b), seconds in cost.items():
                slack = 1e-9 * (abs(seconds) if math.isfinite(seconds) else 0.0)
                if b < last:
                    assert cost[a, b + 1] >= seconds - slack
                if 0 < a < b - 1:
                    assert cost[a + 1, b] <= seconds + slack


@pytest.mark.parametrize("seed", range(80))
def test_the_native_price_is_the_readable_definition(seed: int) -> None:
    r = np.random.default_rng(seed)
    tables = random_tables(seed, max_elements=14, max_devices=8)
    problem = SearchProblem(tables)
    plans = [random_plan(r, tables.num_elements, tables.num_devices) for _ in range(5)]
    # One group has both ends of the model, and what is tied but once.
    plans.append(Plan((Stage(0, tables.num_elements, tuple(range(tables.num_devices))),)))
    for plan in plans:
        groups = groups_of(tables, plan)
        native, plain = problem.price(groups), plan_cost(tables, groups)
        assert native.seconds == pytest.approx(plain.seconds, rel=1e-9)
        for a, b in zip(native.groups, plain.groups, strict=True):
            assert vars(a) == pytest.approx(vars(b), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("seed", range(80))
def test_the_search_prices_one_group_as_the_readable_definition(seed: int) -> None:
    tables = random_tables(seed, max_elements=14, max_devices=8)
    cut = SearchProblem(tables).search(1)
    if cut is not None:
        assert len(cut.groups) == 1
        assert plan_cost(tables, cut.groups).seconds == pytest.approx(cut.seconds, rel=1e-9)


def check_price_of_a_v(seed: int) -> bool:
    """Whether there is a plan, and whether it is folded somewhere."""
    tables = random_tables(seed, max_elements=20)
    if tables.num_elements < 2:
        return False
    steps = v_steps(tables.work, float(np.random.default_rng(seed).choice([0.35, 0.5, 0.65])))
    assert len(steps) == tables.num_elements + 1
    cut = SearchProblem(tables, steps).search()
    if cut is None:
        return False
    assert sorted(e for g in cut.groups for e in g.elements) == list(range(tables.num_elements))
    assert all(len(g.chunks) <= 2 for g in cut.groups)
    assert plan_cost(tables, cut.groups).seconds == pytest.approx(cut.seconds, rel=1e-9)
    assert SearchProblem(tables).price(cut.groups).seconds == pytest.approx(cut.seconds, rel=1e-9)
    return any(len(g.chunks) == 2 for g in cut.groups)


def test_the_price_of_a_v_is_the_readable_definition() -> None:
    folded = [check_price_of_a_v(seed) for seed in range(40)]
    assert sum(folded) >= 15


@pytest.mark.parametrize("seed", range(30))
def test_the_shortfall_is_the_least_extra_budget(seed: int) -> None:
    tables = random_tables(seed)
    problem = SearchProblem(tables)
    short = problem.shortfall()
    assert (short == 0) == (problem.search() is not None)
    if short:
        assert SearchProblem(with_budget(tables, short)).search() is not None
        assert SearchProblem(with_budget(tables, short - 1)).search() is None


def with_budget(tables: Tables, more: float) -> Tables:
    return replace(tables, budget=tables.budget + more)


def test_groups_of_a_granule_only() -> None:
    for seed in range(40):
        tables = random_tables(seed, max_devices=8)
        if tables.num_devices % 2:
            continue
        cut = SearchProblem(tables, granule=2).search()
        free = SearchProblem(tables).search()
        if cut is not None:
            assert free is not None
            assert free.seconds <= cut.seconds * (1 + 1e-9)
            assert all(len(g.devices) % 2 == 0 and g.devices[0] % 2 == 0 for g in cut.groups)


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_are_dealt_as_the_router_deals_them(seed: int) -> None:
    r = np.random.default_rng(seed)
    count, devices = int(r.integers(1, 40)), 8
    work = r.choice([1.0, 2.0, 2.0, 3.5], count) if seed % 2 else r.uniform(1, 10, count)
    tokens = np.rint(r.uniform(10, 1000, count))
    table = shares(work, tokens, devices)
    for degree in range(1, devices + 1):
        part = partition(work.tolist(), degree)
        loads = [sum(w for w, p in zip(work, part, strict=True) if p == q) for q in range(degree)]
        assert table.share[degree] == pytest.approx(max(loads) / work.sum())
        for number in range(1, 4):
            most = max(
                sum(sorted((t for t, p in zip(tokens, part, strict=True) if p == q))[-number:])
                for q in range(degree)
            )
            assert table.top_tokens(degree, number) == most


def test_the_oracle_enumerates_every_cut_once() -> None:
    for elements, devices in ((1, 1), (4, 3), (5, 4)):
        found = list(cuts(elements, devices))
        assert len(found) == len(set(found)) == count_cuts(elements, devices)


def test_the_oracle_refuses_what_it_cannot_enumerate() -> None:
    drawn = (random_tables(seed, max_elements=40, max_devices=40) for seed in range(100))
    tables = next(t for t in drawn if count_cuts(t.num_elements, t.num_devices) > 3_000_000)
    with pytest.raises(ValueError, match="--flexpipe-planner lookahead"):
        exhaustive(tables)
