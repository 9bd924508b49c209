"""The native passes give the very bits of the Python passes, which say what the rules are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given

from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.engine import place
from megatron_flex.schedule.list_scheduler import POLICIES, policy, simulate
from megatron_flex.schedule.placement import Placement, Problem
from megatron_flex.schedule.policies.policy import Limits
from megatron_flex.schedule.replay import replay
from megatron_flex.schedule.routing import route
from tests.oracles import engine as oracle
from tests.unit.schedule.strategies import Case, cases, random_case, tight_memory


def both(case: Case, stop: float = math.inf) -> tuple[Placement | None, Placement | None]:
    rule = POLICIES[case.policy]
    table = route(case.plan, case.costs, case.chains)
    problem = Problem(case.plan, case.costs, table, rule.split, chains=case.chains)
    limits = rule.limits(problem)
    if case.memory is not None and not rule.forwards_first:
        limits = type(limits)(limits.in_flight, case.memory)
    native = place(problem, rule, case.turn, limits, stop)
    return native, oracle.place(problem, rule, case.turn, limits, stop)


@given(cases(devices=12, batches=24))
def test_both_passes_place_every_operation_alike(case: Case) -> None:
    native, python = both(case)
    assert native == python


def test_both_passes_lend_a_tight_memory_alike() -> None:
    """On plans that come back to a device, where a forward may stop what is on its way."""
    looked_at = 0
    for seed in range(1500):
        case = replace(random_case(seed, 4, 10, "zb"), chains=())
        if len(case.plan.devices) < sum(case.plan.degrees):
            native, python = both(replace(case, memory=tight_memory(case)))
            assert native == python
            looked_at += 1
    assert looked_at > 500


@given(cases(devices=8, batches=12))
def test_both_passes_give_up_alike(case: Case) -> None:
    whole, _ = both(case)
    assert whole is not None
    for part in (0.5, 0.9, 0.99, 1.0, 1.01):
        native, python = both(case, stop=part * whole.makespan)
        assert native == python


@given(cases(devices=8, batches=12))
def test_both_passes_run_an_evaluation_alike(case: Case) -> None:
    native = simulate(
        case.plan, case.costs, policy("zb"), turn=case.turn, forward_only=True, chains=case.chains
    )
    none = Limits.none(native.problem)
    assert native == oracle.place(native.problem, policy("zb"), case.turn, none)


@given(cases(devices=12, batches=24))
def test_both_replays_time_an_order_alike(case: Case) -> None:
    placed = case.build().timeline.placement
    native = replay(placed.problem, placed.order)
    python = oracle.replay(placed.problem, placed.order)
    for name in ("order", "start", "finish"):
        assert all(map(np.array_equal, getattr(native, name), getattr(python, name)))
    assert (native.makespan, native.peak) == (python.makespan, python.peak)
    # Operations of no duration may stand in another order at one time.
    assert sorted(native.sequence) == sorted(python.sequence)


def test_a_schedule_of_a_thousand_devices_is_placed() -> None:
    plan = Plan(tuple(Stage(i, i + 1, tuple(range(8 * i, 8 * i + 8))) for i in range(128)))
    costs = OpCosts.uniform(128, 64)
    placed = simulate(plan, costs, policy("1f1b"))
    assert placed.makespan == (8 + 127) * 3
