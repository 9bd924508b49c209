"""Instruction lists say what the simulator decided, in an order that every device shares."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.instructions import (
    BackwardWeight,
    GlobalNorm,
    Program,
    RecvActivation,
    RecvGradient,
    ReduceGradient,
    SendActivation,
    SendGradient,
    SquaredNorm,
    UpdateOrSkip,
)
from megatron_flex.schedule.list_scheduler import policy
from megatron_flex.schedule.replay import replay_program
from tests.unit.schedule.building import build
from tests.unit.schedule.strategies import Case, cases

LAYERS = LayerList(3, tied=True)
TOKENS = (100, 250, 60, 180, 90)


def make(text: str, name: str = "1f1b", world_size: int = 4, tied: bool = True) -> Program:
    plan = Plan.parse(text)
    costs = OpCosts.scaled([s.stop - s.start for s in plan.stages], TOKENS)
    layers = LayerList(3, tied=tied)
    return build(plan, layers, costs, TOKENS, policy(name), world_size=world_size).program


@given(cases(devices=10, batches=20))
def test_both_ends_of_every_pair_list_their_messages_in_one_order(case: Case) -> None:
    sent: dict[tuple[int, int], list[tuple[str, int, int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[str, int, int, int]]] = {}
    for device, steps in enumerate(case.build().program.instructions):
        for x in steps:
            if isinstance(x, SendActivation | SendGradient):
                kind = type(x).__name__.removeprefix("Send")
                sent.setdefault((device, x.peer), []).append(
                    (kind, x.micro_batch, x.stage, x.tokens)
                )
            elif isinstance(x, RecvActivation | RecvGradient):
                kind = type(x).__name__.removeprefix("Recv")
                received.setdefault((x.peer, device), []).append(
                    (kind, x.micro_batch, x.stage, x.tokens)
                )
    assert sent == received
    assert all(source != target for source, target in sent)


@given(cases(devices=10, batches=20))
def test_two_devices_list_the_reductions_that_they_share_in_one_order(case: Case) -> None:
    lists = [
        [x for x in steps if isinstance(x, ReduceGradient)]
        for steps in case.build().program.instructions
    ]
    for a, one in enumerate(lists):
        for other in lists[a + 1 :]:
            shared = set(one) & set(other)
            assert [x for x in one if x in shared] == [x for x in other if x in shared]


@given(cases(devices=10, batches=20))
def test_a_program_replayed_takes_the_time_that_was_predicted(case: Case) -> None:
    schedule = replace(case, memory=(math.inf,) * case.world_size).build()
    again = replay_program(schedule.program, case.costs)
    placed = schedule.timeline.placement
    assert again.makespan == pytest.approx(placed.makespan)
    assert again.peak == pytest.approx(placed.peak)
    assert all(map(np.array_equal, again.order, placed.order))


def test_a_reduction_does_not_wait_for_the_end_of_the_list() -> None:
    built = make("0:4@0,1 | 4:8@2,3")
    steps = built.instructions[2]
    last = max(i for i, x in enumerate(steps) if isinstance(x, SendGradient))
    assert [x.slab for x in steps if isinstance(x, ReduceGradient)] == [4, 5, 6, 7, 8]
    # The head's devices are ready long before the embedding's, whose tied slab comes last.
    assert all(i > last for i, x in enumerate(steps) if isinstance(x, ReduceGradient))
    early = make("0:2@0 | 2:6@1,2 | 6:8@0", "zb")
    steps = early.instructions[1]
    first = next(i for i, x in enumerate(steps) if isinstance(x, ReduceGradient))
    assert not [x for x in steps[first:] if isinstance(x, BackwardWeight)]


def test_reductions_overlap_with_the_backward_of_earlier_stages() -> None:
    built = make("0:4@0 | 4:6@1,2 | 6:8@1,2,0")
    steps = built.instructions[0]
    first = next(i for i, x in enumerate(steps) if isinstance(x, ReduceGradient))
    assert [x for x in steps[first:] if isinstance(x, RecvGradient)]


def test_a_tied_slab_is_reduced_over_the_holders_of_embedding_and_head() -> None:
    built = make("0:2@0,1 | 2:6@2 | 6:8@3")
    reduces = {x for steps in built.instructions for x in steps if isinstance(x, ReduceGradient)}
    assert ReduceGradient(8, (0, 1, 3)) in reduces
    assert {x.slab for x in reduces} == {0, 1, 8}


def test_an_untied_model_on_single_holders_reduces_nothing() -> None:
    built = make("0:2@0 | 2:6@2 | 6:8@3", tied=False)
    assert not [x for steps in built.instructions for x in steps if isinstance(x, ReduceGradient)]


def test_the_lowest_holder_counts_each_norm_and_all_holders_update() -> None:
    built = make("0:2@3,1 | 2:6@2 | 6:8@1")
    norms = {x.slab: d for d, s in enumerate(built.instructions) for x in s
             if isinstance(x, SquaredNorm)}  # fmt: skip
    assert norms == {0: 1, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2, 6: 1, 7: 1, 8: 1}
    updates = [[x.slab for x in s if isinstance(x, UpdateOrSkip)] for s in built.instructions]
    assert updates == [[], [0, 1, 6, 7, 8], [2, 3, 4, 5], [0, 1, 8]]


def test_an_idle_device_only_takes_part_in_the_global_norm() -> None:
    built = make("0:4@0 | 4:8@2", world_size=5)
    assert built.instructions[1] == built.instructions[3] == (GlobalNorm(),)


def test_a_replica_without_micro_batches_still_reduces_and_updates() -> None:
    plan = Plan.parse("0:4@0,1,2 | 4:8@3")
    built = build(plan, LAYERS, OpCosts.uniform(2, 2), (5, 5), world_size=4).program
    assert [type(x).__name__ for x in built.instructions[2]] == [
        *["ReduceGradient"] * 5, "GlobalNorm", *["UpdateOrSkip"] * 5
    ]  # fmt: skip


def test_an_evaluation_only_runs_forward_and_meets_at_the_end() -> None:
    plan = Plan.parse("0:4@0 | 4:8@1")
    costs = OpCosts.scaled([4, 4], TOKENS)
    built = build(plan, LAYERS, costs, TOKENS, policy("zb"), world_size=2, forward_only=True)
    names = {type(x).__name__ for steps in built.program.instructions for x in steps}
    assert names == {"Forward", "SendActivation", "RecvActivation", "GlobalNorm"}
    assert built.timeline.peak == (0.0, 0.0)
    assert built.timeline.makespan == built.timeline.placement.makespan


def test_the_timeline_adds_reductions_norm_and_updates() -> None:
    plan = Plan.parse("0:4@0,1 | 4:8@2")
    costs = OpCosts.uniform(2, 2, reduce=[1.0] * 8, update=[0.5] * 8)
    layers = LayerList(3, tied=False)
    line = build(plan, layers, costs, (5, 5), world_size=3).timeline
    computed = line.placement.makespan
    # Slabs 0 to 3 of stage 0 are reduced one after the other when both holders are done.
    assert [r.finish - r.start for r in line.reduces[0]] == [1.0] * 4
    assert line.reduces[0] == line.reduces[1]
    assert line.reduces[2] == ()
    assert line.norm == computed + 4.0
    assert line.update == (2.0, 2.0, 2.0)
    assert line.makespan == line.norm + 2.0


def test_what_does_not_belong_together_is_refused() -> None:
    plan = Plan.parse("0:4@0 | 4:8@1")
    costs = OpCosts.uniform(2, 3)
    with pytest.raises(PlanError, match="names device 1, but there are 1 workers"):
        build(plan, LAYERS, costs, (5, 5, 5), world_size=1)
    with pytest.raises(PlanError, match="covers 8 units, the model has 10"):
        build(plan, LayerList(4, False), costs, (5, 5, 5), world_size=2)
    with pytest.raises(ValueError, match="2 micro-batches have tokens, but 3 have costs"):
        build(plan, LAYERS, costs, (5, 5), world_size=2)


def test_a_program_is_not_replayed_on_a_route_of_others() -> None:
    built = make("0:4@0,1 | 4:8@2")
    table = (built.route[0][::-1], (1,) * len(TOKENS))
    costs = OpCosts.scaled([4, 4], TOKENS)
    with pytest.raises(ValueError, match="micro-batches of stage 1 to device 1, which does not"):
        replay_program(replace(built, route=table), costs)
