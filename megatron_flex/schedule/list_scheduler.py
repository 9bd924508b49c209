"""List scheduler and simulator in one: from a plan and its costs to programs and predictions.

placement = simulate(plan, costs, policy("1f1b"))       # times only, for the planner
choice = search(plan, costs, memory=budget)             # the best of a few rules and orders
schedule = finish(placement, layers, tokens, world_size=4, name="1f1b")
schedule.program                                        # instruction lists of all devices
schedule.timeline.makespan                              # predicted seconds
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import numpy as np

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.emit import emit
from megatron_flex.schedule.engine import place
from megatron_flex.schedule.instructions import Program
from megatron_flex.schedule.operations import check_chains
from megatron_flex.schedule.placement import Placement, Problem
from megatron_flex.schedule.policies.controllable import V_HALF, V_MIN
from megatron_flex.schedule.policies.gpipe import GPIPE
from megatron_flex.schedule.policies.interleaved import INTERLEAVED
from megatron_flex.schedule.policies.one_f_one_b import ONE_F_ONE_B
from megatron_flex.schedule.policies.policy import Limits, Policy, pipeline_memory
from megatron_flex.schedule.policies.seq1f1b import SEQ1F1B
from megatron_flex.schedule.policies.straight import is_even_straight
from megatron_flex.schedule.policies.zero_bubble import ZB, ZB_H1, ZB_H2
from megatron_flex.schedule.policies.zero_bubble_v import ZB_V, is_v
from megatron_flex.schedule.replay import ScheduleError, replay
from megatron_flex.schedule.routing import Route, check_route, route
from megatron_flex.schedule.timeline import Timeline, timeline
from megatron_flex.schedule.transition import Transition
from megatron_flex.schedule.turns import by_number, turns

Chains = Sequence[Sequence[int]]
"""Micro-batches that hold the slices of one sample, in order."""

_POLICIES = (GPIPE, ONE_F_ONE_B, SEQ1F1B, INTERLEAVED, ZB_H1, ZB_H2, ZB_V, V_HALF, V_MIN, ZB)
POLICIES: dict[str, Policy] = {p.name: p for p in _POLICIES}


def policy(name: str) -> Policy:
    """The policy of that name; ``ValueError`` lists the names there are."""
    if name not in POLICIES:
        raise ValueError(f"no schedule is named '{name}'; there are {', '.join(POLICIES)}")
    return POLICIES[name]


@dataclass(frozen=True)
class Schedule:
    """What one iteration does, and what it is predicted to take.

    Attributes:
        policy: name of the rule that placed it.
        program: instruction lists of all devices.
        timeline: predicted times, bubbles and peak activation bytes.
    """

    policy: str
    program: Program
    timeline: Timeline


@dataclass(frozen=True)
class Choice:
    """The best of several simulations.

    Attributes:
        policy: the winning rule.
        turn: the winning order of entry.
        placement: every operation with its time.
        fits: whether the activations stay within the memory that was allowed.
        tried: simulations that were run.
    """

    policy: Policy
    turn: tuple[int, ...]
    placement: Placement
    fits: bool
    tried: int


def simulate(
    plan: Plan,
    costs: OpCosts,
    rule: Policy,
    *,
    table: Route | None = None,
    turn: Sequence[int] | None = None,
    memory: Sequence[float] | None = None,
    forward_only: bool = False,
    chains: Chains = (),
) -> Placement:
    """Place every operation; no instructions are made.

    Args:
        table: ``table[stage][micro_batch]`` is the device; default :func:`routing.route`.
        turn: micro-batches in the order of entry; default by number.
        memory: bytes of activations that each device (by number) may hold, instead of the
            policy's own limit. A textbook order that needs more gives way to the policy's rule;
            GPipe holds everything, whatever the limit.
        forward_only: an evaluation.
        chains: micro-batches that hold the slices of one sample, in order.
    """
    problem = _problem(plan, costs, rule, table, forward_only, chains)
    placement = _simulate(problem, rule, _turn(turn, problem), memory, math.inf)
    assert placement is not None  # only a finite stop gives None
    return placement


def search(
    plan: Plan,
    costs: OpCosts,
    *,
    table: Route | None = None,
    memory: Sequence[float] | None = None,
    tries: int = 8,
    enough: float = 1e-3,
    stop: float = math.inf,
    chains: Chains = (),
) -> Choice | None:
    """The shortest of up to ``tries`` simulations: zero-bubble rules and orders of entry.

    Args:
        memory: bytes of activations that each device may hold; default one pipeline's worth
            (:func:`pipeline_memory`, the memory of 1F1B).
        enough: stop looking when this close (relative) to what no schedule can beat.
        stop: only schedules shorter than this many seconds are of interest.

    Returns ``None`` if no simulation beats ``stop``. A schedule within the memory is preferred to
    a shorter one that is not.
    """
    problem = _problem(plan, costs, ZB, table, False, chains)
    allowed = tuple(pipeline_memory(problem) if memory is None else memory)
    bound = lower_bound(problem)
    best: Choice | None = None
    tried = 0
    for rule, turn in _candidates(problem, tries):
        limit = best.placement.makespan if best is not None and best.fits else stop
        placement = _simulate(problem, rule, turn, allowed, limit)
        tried += 1
        if placement is None or placement.makespan >= limit:
            continue
        fits = all(p <= a * (1 + 1e-9) for p, a in zip(placement.peak, allowed, strict=False))
        key = (not fits, placement.makespan)
        if best is None or key < (not best.fits, best.placement.makespan):
            best = Choice(rule, turn, placement, fits, tried)
        if best.fits and best.placement.makespan <= bound * (1 + enough):
            break
    return None if best is None else replace(best, tried=tried)


def lower_bound(problem: Problem) -> float:
    """Seconds that no schedule of this plan and routing can beat.

    Every device waits for the first forward to reach it, then has its work to do; and every
    micro-batch must pass through all stages and back.
    """
    costs, route = problem.costs, problem.route_array
    stages, batches = route.shape
    moved = np.zeros((stages, batches))  # seconds on the link into each stage
    moved[1:] = np.where(route[1:] != route[:-1], costs.transfer, 0.0)
    work = problem.operations.seconds.reshape(-1, stages, batches).sum(axis=0)
    arrival = np.cumsum(moved, axis=0)
    arrival[1:] += np.cumsum(costs.forward, axis=0)[:-1]
    load = np.bincount(route.ravel(), weights=work.ravel(), minlength=problem.num_devices)
    first = np.full(problem.num_devices, np.inf)
    np.minimum.at(first, route.ravel(), arrival.ravel())
    bound = float((load + first)[np.isfinite(first)].max())
    chain = arrival[-1] + costs.forward[-1]
    if not problem.forward_only:
        weight = costs.backward_weight
        chain = chain + moved.sum(axis=0) + costs.backward_input.sum(axis=0)
        chain = chain + (weight[0] if problem.split else weight.sum(axis=0))
    return max(bound, float(chain.max()))


def finish(
    placement: Placement,
    layers: LayerList,
    tokens: Sequence[int],
    *,
    world_size: int,
    name: str,
    switch: Transition | None = None,
) -> Schedule:
    """Instruction lists and times of operations that :func:`search` or :func:`simulate` placed."""
    program = emit(placement, layers, tuple(tokens), world_size, switch)
    return Schedule(name, program, timeline(placement, layers))


def _problem(
    plan: Plan,
    costs: OpCosts,
    rule: Policy,
    table: Route | None,
    forward_only: bool,
    chains: Chains,
) -> Problem:
    found = tuple(tuple(chain) for chain in chains)
    if table is None:
        check_chains(found, costs.num_micro_batches)
        table = route(plan, costs, found)
    else:
        check_route(plan, table, costs.num_micro_batches)
        check_chains(found, costs.num_micro_batches, table)
    return Problem(plan, costs, table, rule.split and not forward_only, forward_only, found)


def _turn(turn: Sequence[int] | None, problem: Problem) -> Sequence[int]:
    batches = range(problem.costs.num_micro_batches)
    if turn is None:
        return by_number(len(batches), problem.chains)
    if sorted(turn) != list(batches):
        raise ValueError(f"the order of entry must name micro-batches 0 to {batches[-1]} once each")
    place = {m: i for i, m in enumerate(turn)}
    for chain in problem.chains:
        if any(place[b] <= place[a] for a, b in pairwise(chain)):
            raise ValueError(f"the order of entry must keep the order of the chain {chain}")
    return turn


def _simulate(
    problem: Problem,
    rule: Policy,
    turn: Sequence[int],
    memory: Sequence[float] | None,
    stop: float,
) -> Placement | None:
    limits = rule.limits(problem)
    if memory is not None and not rule.forwards_first:
        if len(memory) < problem.num_devices:
            raise ValueError(f"memory names {len(memory)} devices of {problem.num_devices}")
        limits = Limits(limits.in_flight, tuple(memory))
    else:
        memory = None
    # Most textbooks have no chains.
    textbook = not problem.forward_only and (rule.chains or not problem.chains)
    orders = rule.order(problem, turn) if textbook else None
    if orders is not None:
        try:
            placement = replay(problem, orders)
        except ScheduleError:  # the textbook's order needs the textbook's routing
            return place(problem, rule, turn, limits, stop)
        allowed = zip(placement.peak, limits.memory, strict=False)
        if memory is None or all(p <= m * (1 + 1e-9) for p, m in allowed):
            return placement
    return place(problem, rule, turn, limits, stop)


def _candidates(problem: Problem, tries: int) -> Iterator[tuple[Policy, tuple[int, ...]]]:
    """Rules and orders of entry, most promising first.

    The free rule gains most from a good order of entry; where all micro-batches are equal there is
    only one, and the textbook's orders may be better.
    """
    pipeline = max(1, round(len(problem.plan.devices) / max(problem.plan.degrees)))
    given = tuple(range(problem.costs.num_micro_batches))
    promising = islice(turns(problem.costs, pipeline, problem.chains), tries)
    found = [(ZB, turn) for _, turn in promising]
    for rule, fits in ((ZB_V, is_v(problem.plan)), (ZB_H1, is_even_straight(problem.plan))):
        if fits:
            found.insert(min(4, len(found)), (rule, given))
    yield from found[:tries]
