"""Whatever the plan and the policy, the simulator obeys the laws of a pipeline."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from megatron_flex.planner.plan import Plan
from megatron_flex.schedule import engine
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.list_scheduler import (
    POLICIES,
    lower_bound,
    policy,
    search,
    simulate,
)
from megatron_flex.schedule.operations import OpKind
from megatron_flex.schedule.placement import Placement
from megatron_flex.schedule.policies.policy import Limits
from megatron_flex.schedule.replay import ScheduleError, replay
from megatron_flex.schedule.turns import turns
from tests.unit.schedule.strategies import Case, cases, tight_memory

CLOSE = 1e-6


def place(case: Case, forward_only: bool = False) -> Placement:
    return simulate(
        case.plan,
        case.costs,
        POLICIES[case.policy],
        turn=case.turn,
        memory=case.memory,
        forward_only=forward_only,
    )


@given(cases(devices=8, batches=16))
def test_every_operation_runs_once_on_its_device_one_at_a_time(case: Case) -> None:
    placed = place(case)
    problem = placed.problem
    seen = sorted(code for order in placed.order for code in order)
    assert seen == list(range(len(problem.operations.seconds)))
    for device, order in enumerate(placed.order):
        now = 0.0
        for code in order:
            _, stage, micro_batch = problem.decode(code)
            assert problem.route[stage][micro_batch] == device
            assert placed.start[code] >= now - CLOSE
            assert placed.finish[code] == placed.start[code] + problem.operations.seconds[code]
            now = placed.finish[code]
    assert placed.makespan == max(placed.finish)


@given(cases(devices=8, batches=16))
def test_nothing_starts_before_its_input_has_crossed_the_link(case: Case) -> None:
    placed = place(case)
    problem, costs = placed.problem, case.costs
    last = costs.num_stages - 1
    for code in range(len(placed.start)):
        kind, stage, micro_batch = problem.decode(code)
        needs: list[tuple[OpKind, int]] = []
        if kind == OpKind.FORWARD and stage:
            needs.append((OpKind.FORWARD, stage - 1))
        elif kind == OpKind.BACKWARD:
            needs.append((OpKind.FORWARD, stage))
            if stage < last:
                needs.append((OpKind.BACKWARD, stage + 1))
        elif kind == OpKind.WEIGHT:
            needs.append((OpKind.BACKWARD, stage))
        for needed, source in needs:
            before = problem.encode(needed, source, micro_batch)
            wire = 0.0
            if problem.route[source][micro_batch] != problem.route[stage][micro_batch]:
                wire = costs.transfer[min(source, stage)][micro_batch]
            assert placed.start[code] >= placed.finish[before] + wire - CLOSE
            assert placed.sequence[before] < placed.sequence[code]


@given(cases(devices=8, batches=16))
def test_the_peak_is_what_the_order_holds_at_most(case: Case) -> None:
    placed = place(case)
    problem = placed.problem
    freeing = OpKind.WEIGHT if problem.split else OpKind.BACKWARD
    for device, order in enumerate(placed.order):
        held = peak = 0.0
        for code in order:
            kind, stage, micro_batch = problem.decode(code)
            size = case.costs.activation[stage][micro_batch]
            if kind == OpKind.FORWARD:
                held += size
                peak = max(peak, held)
            elif kind == freeing:
                held -= size
        assert placed.peak[device] == pytest.approx(peak)
        assert held == pytest.approx(0.0, abs=CLOSE)


@given(cases(devices=8, batches=16))
def test_a_replay_of_the_order_gives_the_same_times(case: Case) -> None:
    free = (math.inf,) * case.world_size
    placed = place(replace(case, memory=free))
    again = replay(placed.problem, placed.order)
    assert again.makespan == pytest.approx(placed.makespan)
    assert again.start == pytest.approx(placed.start, abs=CLOSE)
    starts = again.start[np.argsort(again.sequence)]
    assert (np.diff(starts) >= 0).all()
    assert again.peak == pytest.approx(placed.peak)


@given(cases(devices=8, batches=16))
def test_a_replay_is_never_slower_than_the_pass_that_waited_for_memory(case: Case) -> None:
    placed = place(case)
    again = replay(placed.problem, placed.order)
    assert again.makespan <= placed.makespan * (1 + CLOSE)
    assert again.peak == pytest.approx(placed.peak)


@given(cases(devices=8, batches=16))
def test_no_schedule_beats_the_lower_bound(case: Case) -> None:
    placed = place(case)
    assert placed.makespan >= lower_bound(placed.problem) - CLOSE
    evaluation = place(case, forward_only=True)
    assert evaluation.makespan >= lower_bound(evaluation.problem) - CLOSE


@given(cases(devices=8, batches=16, policy="zb"))
def test_a_memory_limit_is_kept_whenever_the_largest_micro_batch_fits(case: Case) -> None:
    """Also where a device needs the memory twice for a micro-batch: no deadlock, no excess."""
    plan, costs, memory = case.plan, case.costs, tight_memory(case)
    placed = simulate(plan, costs, policy("zb"), turn=case.turn, memory=memory)
    assert sum(map(len, placed.order)) == len(placed.start)
    for peak, allowed in zip(placed.peak, memory, strict=True):
        assert peak <= allowed * (1 + CLOSE)


@given(cases(devices=8, batches=16, policy="zb"))
def test_what_can_be_placed_in_time_is_not_given_up(case: Case) -> None:
    """Also where one way of lending memory stops the pipeline, and the other has to be tried."""
    placed = simulate(
        case.plan, case.costs, policy("zb"), turn=case.turn, memory=tight_memory(case)
    )
    limits = Limits(policy("zb").limits(placed.problem).in_flight, tight_memory(case))
    for margin in (1.001, 1.1, 1.5):
        stop = margin * placed.makespan + 1e-9
        again = engine.place(placed.problem, policy("zb"), case.turn, limits, stop)
        assert again is not None
        assert again.makespan == placed.makespan


def test_a_limit_below_one_micro_batch_is_exceeded_and_shown() -> None:
    plan = Plan.parse("0:4@0 | 4:8@1")
    costs = OpCosts.uniform(2, 3, activation=10.0)
    placed = simulate(plan, costs, policy("zb"), memory=[5.0, 5.0])
    assert placed.peak == (10.0, 10.0)
    choice = search(plan, costs, memory=[5.0, 5.0])
    assert choice is not None
    assert not choice.fits


def test_messages_of_one_pair_share_its_link() -> None:
    plan = Plan.parse("0:4@0 | 4:8@1")
    costs = OpCosts.uniform(
        2, 4, forward=1.0, backward_input=0.0, backward_weight=0.0, transfer=3.0
    )
    placed = simulate(plan, costs, policy("gpipe"), forward_only=True)
    # Outputs are ready at 1, 2, 3, 4; the link takes 3 each: arrivals at 4, 7, 10, 13.
    assert [placed.start[placed.problem.encode(OpKind.FORWARD, 1, m)] for m in range(4)] == [
        4.0, 7.0, 10.0, 13.0
    ]  # fmt: skip


def test_an_order_with_an_operation_twice_or_elsewhere_is_refused() -> None:
    plan = Plan.parse("0:4@0 | 4:8@1")
    placed = simulate(plan, OpCosts.uniform(2, 2), policy("1f1b"))
    one, other = (order.tolist() for order in placed.order)
    with pytest.raises(ScheduleError, match="forward of micro-batch 0 on stage 0 2 times"):
        replay(placed.problem, ([one[0], one[0], *one[2:]], other))
    with pytest.raises(ScheduleError, match="hold operations on devices that do not run them"):
        replay(placed.problem, ([], [*one, *other]))


def test_an_order_that_cannot_run_is_refused_with_device_and_operation() -> None:
    plan = Plan.parse("0:4@0 | 4:8@1")
    placed = simulate(plan, OpCosts.uniform(2, 2), policy("1f1b"))
    late = (placed.order[0][::-1], placed.order[1])
    with pytest.raises(ScheduleError, match=r"device 0 waits at its operation 0 \(backward of"):
        replay(placed.problem, late)
    with pytest.raises(ScheduleError, match=r"device 0 waits|micro-batch 1 on stage 1 never"):
        replay(placed.problem, (placed.order[0], placed.order[1][:-1]))


@given(cases(devices=6, batches=12))
def test_search_is_at_least_as_good_as_its_parts_within_the_memory(case: Case) -> None:
    choice = search(case.plan, case.costs, memory=case.memory, enough=0.0)
    assert choice is not None
    assert choice.placement.makespan >= lower_bound(choice.placement.problem) - CLOSE
    single = simulate(
        case.plan, case.costs, choice.policy, turn=choice.turn,
        memory=case.memory or choice.placement.peak,
    )  # fmt: skip
    if case.memory:
        assert single.makespan == choice.placement.makespan
        fits = all(p <= m * (1 + CLOSE) for p, m in zip(single.peak, case.memory, strict=False))
        assert choice.fits == fits
    # A limit that cannot be beaten is answered with nothing, one that can with the same.
    assert search(case.plan, case.costs, memory=case.memory, stop=0.0) is None
    if choice.fits:
        limit = choice.placement.makespan * 1.01 + 1e-9
        again = search(case.plan, case.costs, memory=case.memory, enough=0.0, stop=limit)
        assert again is not None
        assert again.placement.makespan == pytest.approx(choice.placement.makespan)


def test_memory_for_too_few_devices_is_refused() -> None:
    plan = Plan.parse("0:4@0 | 4:8@1")
    with pytest.raises(ValueError, match="memory names 1 devices of 2"):
        simulate(plan, OpCosts.uniform(2, 2), policy("zb"), memory=[1.0])


def test_an_order_of_entry_that_misses_a_micro_batch_is_refused() -> None:
    plan = Plan.parse("0:4@0 | 4:8@1")
    with pytest.raises(ValueError, match="micro-batches 0 to 2 once each"):
        simulate(plan, OpCosts.uniform(2, 3), policy("zb"), turn=[0, 1, 1])


def test_costs_that_are_no_costs_are_refused() -> None:
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"costs.forward, row 0"):
            OpCosts.uniform(2, 2, forward=bad)
        with pytest.raises(ValueError, match=r"costs.update"):
            OpCosts.uniform(2, 2, update=[1.0, bad])
    one = np.ones((1, 1))
    with pytest.raises(ValueError, match=r"costs.transfer must have 0 rows"):
        OpCosts(one, one, one, one, one)
    with pytest.raises(ValueError, match="one stage and one micro-batch"):
        OpCosts.uniform(2, 0)


def test_orders_of_entry_have_the_small_micro_batches_where_their_names_say() -> None:
    costs = OpCosts.scaled([4, 4], (50, 10, 80, 20, 60, 30, 70, 40))
    found = dict(turns(costs, 1))
    assert list(found) == [
        "small-ends", "tent", "ascending", "small-ends-short", "given", "descending"
    ]  # fmt: skip
    assert found["small-ends"] == (1, 3, 0, 4, 6, 2, 7, 5)
    assert found["small-ends-short"] == (1, 5, 7, 0, 4, 6, 2, 3)
    assert found["tent"] == (1, 5, 0, 6, 2, 4, 7, 3)
    assert found["ascending"] == found["descending"][::-1] == (1, 3, 5, 7, 0, 4, 6, 2)
    assert list(turns(OpCosts.scaled([4, 4], (5, 5, 5)), 1)) == [("given", (0, 1, 2))]
