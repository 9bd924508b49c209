"""Slices of one sample follow one another through every stage, and back in reverse."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.instructions import Backward, BackwardInput, Forward, Program
from megatron_flex.schedule.list_scheduler import POLICIES, policy, search, simulate
from megatron_flex.schedule.operations import OpKind, check_chains
from megatron_flex.schedule.placement import Placement
from megatron_flex.schedule.routing import route
from megatron_flex.schedule.text import dumps, loads
from megatron_flex.schedule.turns import turns
from megatron_flex.schedule.validate import ProgramError, validate
from tests.unit.schedule.building import build
from tests.unit.schedule.strategies import Case, cases, random_case, random_chains

CLOSE = 1e-9


def chained(seed: int) -> Case:
    """A random case with at least one chain, and now and then little memory."""
    rng = random.Random(seed)
    case = random_case(seed, devices=8, batches=24)
    chains = case.chains
    while not chains and len(case.tokens) > 1:
        chains = random_chains(rng, len(case.tokens))
    turn = list(case.turn)
    for chain in chains:
        for place, m in zip(sorted(map(turn.index, chain)), chain, strict=True):
            turn[place] = m
    return replace(case, chains=chains, turn=tuple(turn))


def follows(placed: Placement, chain: tuple[int, ...]) -> bool:
    """Whether a chain's forwards are in order on every stage, and its backwards in reverse."""
    problem = placed.problem
    return all(
        placed.start[problem.encode(kind, stage, b)]
        >= placed.finish[problem.encode(kind, stage, a)] - CLOSE
        for stage in range(len(problem.route))
        for kind, order in ((OpKind.FORWARD, chain), (OpKind.BACKWARD, chain[::-1]))
        for a, b in pairwise(order)
    )


def check(case: Case) -> None:
    schedule = case.build()
    placed = schedule.timeline.placement
    assert all(follows(placed, chain) for chain in case.chains)
    validate(schedule.program, case.layers)
    assert loads(dumps(schedule.program)) == schedule.program


def test_random_programs_with_chains_are_placed_and_accepted(
    count: Callable[[int, int], int],
) -> None:
    for seed in range(count(200, 5000)):
        check(chained(seed))


def whole(case: Case) -> NDArray[np.float64]:
    """Bytes that each chain or single micro-batch takes on each device, ``[devices, leads]``."""
    ops = simulate(
        case.plan, case.costs, policy("zb"), turn=case.turn, chains=case.chains
    ).problem.operations
    found = np.zeros((ops.devices, ops.batches))
    np.add.at(found, (ops.device, np.tile(ops.lead, ops.kinds * ops.stages)), ops.takes)
    return found


@given(cases(devices=8, batches=16))
def test_no_device_holds_more_than_it_may_where_each_chain_fits_alone(case: Case) -> None:
    case = chained(hash(case.turn) % 2**31)
    rng = random.Random(1)
    room = tuple(float(row.max()) * rng.uniform(1.0, 2.0) for row in whole(case))
    memory = room + (0.0,) * (case.world_size - len(room))
    for rule in (policy("zb"), policy("1f1b")):
        placed = simulate(
            case.plan, case.costs, rule, turn=case.turn, memory=memory, chains=case.chains
        )
        assert all(p <= m * (1 + 1e-6) for p, m in zip(placed.peak, memory, strict=False))


def test_a_chain_counts_as_one_forward_in_flight() -> None:
    plan, layers = Plan.parse("0:4@0 | 4:8@1"), LayerList(3, False)
    costs = OpCosts.uniform(2, 8)
    chain = tuple(range(8))
    built = build(plan, layers, costs, [1] * 8, policy("1f1b"), world_size=2, chains=[chain])
    placed = built.timeline.placement
    assert follows(placed, chain)
    validate(built.program, layers)


def test_a_search_knows_chains() -> None:
    costs = OpCosts.scaled([1, 1, 1, 1], [4.0, 4.0, 4.0, 1.0, 2.0, 3.0])
    plan = Plan.parse("0:2@0 | 2:4@1 | 4:6@2 | 6:8@3")
    found = search(plan, costs, chains=[(0, 1, 2)])
    assert found is not None
    assert follows(found.placement, (0, 1, 2))
    assert found.fits


@given(cases(devices=8, batches=16))
def test_a_chain_goes_to_one_replica_of_each_stage(case: Case) -> None:
    case = chained(hash(case.turn) % 2**31)
    table = route(case.plan, case.costs, case.chains)
    check_chains(case.chains, len(case.tokens), table)


def test_orders_of_entry_keep_slices_together() -> None:
    costs = OpCosts.scaled([1, 1], [4.0, 4.0, 4.0, 1.0, 2.0, 30.0])
    for _, turn in turns(costs, 2, [(2, 1, 0)]):
        place = turn.index(2)
        assert turn[place : place + 3] == (2, 1, 0)
        assert sorted(turn) == list(range(6))


def program(policy_name: str = "zb-h1") -> tuple[Program, LayerList]:
    layers = LayerList(3, True)
    plan = Plan.parse("0:4@0 | 4:8@1")
    costs = OpCosts.uniform(2, 5)
    chain = [(1, 3, 2)]
    built = build(plan, layers, costs, [7] * 5, POLICIES[policy_name], world_size=2, chains=chain)
    validate(built.program, layers)
    return built.program, layers


def swapped(program: Program, device: int, kind: type, first: int, second: int) -> Program:
    """The program with two operations of a device exchanged."""
    steps = list(program.instructions[device])
    a, b = (
        next(i for i, s in enumerate(steps) if isinstance(s, kind) and s.micro_batch == m)  # type: ignore[attr-defined]
        for m in (first, second)
    )
    steps[a], steps[b] = steps[b], steps[a]
    lists = list(program.instructions)
    lists[device] = tuple(steps)
    return replace(program, instructions=tuple(lists))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_swapped_backward_of_two_slices_is_refused(name: str) -> None:
    good, layers = program(name)
    kind = Backward if name == "1f1b" else BackwardInput
    with pytest.raises(ProgramError, match="the slice after it, is not done") as caught:
        validate(swapped(good, 1, kind, 2, 3), layers)
    assert caught.value.device == 1


def test_a_swapped_forward_of_two_slices_is_refused() -> None:
    good, layers = program()
    with pytest.raises(ProgramError, match="the slice before it, which has not been forwarded"):
        validate(swapped(good, 0, Forward, 1, 3), layers)


def test_a_chain_on_two_replicas_is_refused() -> None:
    good, layers = program()
    wide = replace(good, chains=((0, 9),))
    with pytest.raises(ProgramError, match="chain"):
        validate(wide, layers)
    with pytest.raises(ValueError, match="several devices of stage 0"):
        check_chains([(0, 1)], 2, [(0, 1)])


@pytest.mark.parametrize(
    ("chains", "words"),
    [([(1,)], "at least two"), ([(0, 1), (1, 2)], "micro-batch 1"), ([(0, 5)], "micro-batch 5")],
)
def test_chains_that_cannot_be_are_refused(chains: list[tuple[int, ...]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_chains(chains, 3)


def test_an_order_of_entry_against_the_chain_is_refused() -> None:
    costs = OpCosts.uniform(1, 3)
    with pytest.raises(ValueError, match="keep the order of the chain"):
        simulate(Plan.parse("0:8@0"), costs, policy("zb"), turn=[2, 1, 0], chains=[(0, 1)])
