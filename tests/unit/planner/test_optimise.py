"""O_plan: what is recomputed and offloaded."""

from __future__ import annotations

import math
from itertools import product

import pytest

from megatron_flex.planner.cost import Group, Savings, group_cost, saving_steps, savings
from megatron_flex.planner.optimise import (
    GroupOptimisation,
    Step,
    _choose,
    _steps,
    _summary,
    o_plan,
    optimise,
)
from megatron_flex.planner.tables import Tables
from tests.unit.planner.instances import random_tables
from tests.unit.planner.instances_real import even_batch, small_model, small_planner


def groups_that_miss(count: int) -> list[tuple[Tables, Group, float]]:
    """Groups of random instances that do not fit as they are, and what they miss."""
    found: list[tuple[Tables, Group, float]] = []
    seed = 0
    while len(found) < count:
        tables = random_tables(seed, max_elements=7, max_devices=3)
        seed += 1
        group = Group(((0, tables.num_elements),), (0,))
        missing = group_cost(tables, group).missing
        if missing > 0:
            found.append((tables, group, missing))
    return found


def brute_force(t: Tables, group: Group, missing: float) -> float:
    """Least seconds over every choice for every element."""
    (begin, end), degree = group.chunks[0], len(group.devices)
    choices = []
    for element in range(begin, end):
        can = savings(t, begin, element, degree)
        activations = [p for p in (can.recompute, can.activations) if p is not None]
        optimizer = [p for p in (can.optimizer,) if p is not None]
        choices.append(
            [
                (a[0] + b[0], a[1] + b[1])
                for a, b in product([(0.0, 0.0), *activations], [(0.0, 0.0), *optimizer])
            ]
        )
    best = math.inf
    for taken in product(*choices):
        if sum(size for size, _ in taken) >= missing:
            best = min(best, sum(seconds for _, seconds in taken))
    return best


@pytest.mark.parametrize("case", range(40))
def test_it_saves_enough_at_nearly_the_least_time(case: int) -> None:
    tables, group, missing = groups_that_miss(40)[case]
    relaxed = group_cost(tables, group).optimisation
    found = optimise(tables, group)
    best = brute_force(tables, group, missing)
    assert math.isinf(found.seconds) == math.isinf(best) == math.isinf(relaxed)
    if math.isinf(best):
        return
    assert found.recomputed + found.offloaded >= missing
    # The searches' relaxation is a lower bound, and one element more is enough.
    (begin, end), degree = group.chunks[0], len(group.devices)
    steps = [s for e in range(begin, end) for s in saving_steps(tables, begin, e, degree)]
    assert relaxed <= best * (1 + 1e-9)
    assert best <= found.seconds * (1 + 1e-9)
    assert found.seconds <= relaxed + max(seconds for _, seconds in steps) + 1e-9
    assert not set(found.recompute) & set(found.activations)


def test_nothing_is_done_when_everything_fits() -> None:
    planner = small_planner(devices=2)
    tables = planner.units.tables(even_batch(4, 512))
    assert optimise(tables, Group(((0, tables.num_elements),), (0, 1))) == GroupOptimisation()


def test_the_o_plan_of_a_tight_job_names_units_that_can_be_optimised() -> None:
    planner = small_planner(devices=2, memory=4.5e9)
    batch = even_batch(8, 4096)
    price = planner.finder([batch]).pricers[0].price(planner.even_plans[0])
    assert price.missing > 0
    assert price.fits
    o = price.plan.o_plan
    assert o
    last = planner.units.num_elements - 1
    assert not {0, last} & {*o.recompute}  # embedding and head are never recomputed
    assert max(price.device_bytes) <= planner.units.budget
    # r and s are reported in bytes, and are what was missing at least.
    predicted = price.predicted(None)
    assert predicted.recomputed_bytes + predicted.offloaded_bytes >= price.missing


def test_without_memory_optimisation_the_same_job_does_not_fit() -> None:
    planner = small_planner(devices=2, memory=4.5e9, memory_optimisation=False)
    price = planner.finder([even_batch(8, 4096)]).pricers[0].price(planner.even_plans[0])
    assert not price.fits
    assert price.shortfall == price.missing > 0


def test_choices_of_groups_come_together_in_units() -> None:
    planner = small_planner(devices=2, unit="layer", config=small_model(layers=2))
    tables = planner.elements.tables(even_batch(2, 128))
    assert tables.points == (0, 1, 3, 5, 6)
    parts = (GroupOptimisation(recompute=(1,)), GroupOptimisation(optimizer=(2, 3)))
    o = o_plan(tables, parts)
    assert (o.recompute, o.optimizer, o.activations) == ((1, 2), (3, 4, 5), ())


def test_what_turned_out_to_be_needless_is_taken_back() -> None:
    steps = [Step(0, "recompute", 4.0, 0.1), Step(1, "recompute", 5.0, 0.2),
             Step(2, "recompute", 8.0, 1.0)]  # fmt: skip
    assert _choose(steps, 13.0) == [1, 2]
    assert _choose(steps, 12.0) == [0, 2]
    assert _choose(steps, 18.0) is None


def test_what_goes_to_the_host_is_not_recomputed_too() -> None:
    possible = {0: Savings(None, (4.0, 0.1), (9.0, 1.0))}
    steps = _steps(possible)
    assert [(s.action, s.size, s.after) for s in steps] == [
        ("recompute", 4.0, None), ("activations", 5.0, 0)
    ]  # fmt: skip
    done = _summary(possible, {(s.element, s.action) for s in steps}, steps)
    assert (done.recompute, done.activations) == ((), (0,))
    assert (done.recomputed, done.offloaded, done.seconds) == (0.0, 9.0, 1.0)
