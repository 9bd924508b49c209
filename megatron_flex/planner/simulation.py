"""A plan's iteration as the schedule would run it: op costs, simulated time, bytes per device.

The searches rank by the closed form of :mod:`cost`; the final choice among the best few, and what
the log predicts, is the schedule's own simulation with these costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_flex.model.layers import Kind
from megatron_flex.planner.build import MESSAGE_BUFFERS, Batch, ModelCosts
from megatron_flex.planner.memory import chain_bytes
from megatron_flex.planner.options import AUTO, PlannerOptions
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.tables import Array
from megatron_flex.quantities import size
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.list_scheduler import policy, search, simulate
from megatron_flex.schedule.placement import Placement
from megatron_flex.schedule.residency import at_once
from megatron_flex.schedule.routing import Route
from megatron_flex.schedule.timeline import Timeline, iteration_seconds, timeline

SEARCHED = "zb"
"""Name of the schedule that is chosen among several rules and orders by simulation."""
FUSED = "1f1b"
"""The schedule with a fused backward that :data:`AUTO` falls back to."""


def schedule_of(plan: Plan, options: PlannerOptions) -> str:
    """What a plan runs under: the schedule that it names, or that of the options.

    Where one stage holds all, no device waits for another, so that a backward in halves could only
    cost.
    """
    name = plan.schedule or options.schedule
    return FUSED if name == AUTO and len(plan.stages) == 1 else name


@dataclass(frozen=True)
class Prediction:
    """What one iteration of a plan takes.

    Attributes:
        seconds: the whole iteration, with reductions, the global norm and the update.
        device_bytes: peak bytes on each device of the world, 0 where it is idle.
        timeline: every operation, reduction and update with its time.
        schedule: the policy that ordered the operations.
        spare: bytes of the whole budget in which it was to place no activations.
    """

    seconds: float
    device_bytes: tuple[float, ...]
    timeline: Timeline
    schedule: str
    spare: int = 0

    @property
    def placement(self) -> Placement:
        """Every operation with its time."""
        return self.timeline.placement


def op_costs(costs: ModelCosts, plan: Plan, batch: Batch) -> OpCosts:
    """Costs of every operation. ``costs`` must have single units as elements.

    A recomputed unit runs its forward again at the beginning of its backward, and keeps its input
    only. Offloaded activations leave the device after their forward: they count as kept input,
    which the prefetched ones replace. Transfers take the slower link where replicas of two stages
    meet across servers.
    """
    if costs.num_elements != costs.layers.num_units:
        raise ValueError("operations are priced by unit: give the costs of single units")
    plan.check(costs.layers.num_units, costs.cluster.world_size)
    basis = np.stack([np.ones_like(batch.tokens), batch.tokens, batch.squares])
    o = plan.o_plan
    again = np.zeros(costs.num_elements)
    again[list(o.recompute)] = 1.0
    kept = np.array(costs.activation)
    for unit in (*o.recompute, *o.activations):
        kept[unit] = min(kept[unit], costs.profile.boundary)
    starts = [stage.start for stage in plan.stages]

    def table(coefficients: Array) -> Array:
        """``[3, units]`` coefficients to seconds of every stage and micro-batch."""
        found: Array = np.add.reduceat(coefficients, starts, axis=1).T @ basis
        return found

    # Units that do not put off their weight half have its time in the input half.
    waits = np.ones(costs.num_elements)
    waits[list(at_once(o))] = 0.0
    forward = table(costs.forward)
    whole = costs.backward_weight * (1.0 - waits)
    inputs = table(costs.backward_input + costs.forward * again + whole)
    weights = table(costs.backward_weight * waits)
    # Between the halves a stage holds what is owed; the embedding owes, but keeps nothing before.
    # By the plan's own schedule: where it was recorded, the flags may name none that splits.
    name = schedule_of(plan, costs.options)
    splits = name == AUTO or policy(name).split
    halves = costs.owed * waits if splits else np.zeros(costs.num_elements)
    most = np.maximum(np.add.reduceat(kept, starts), np.add.reduceat(halves, starts))
    held = np.outer(most, batch.tokens)
    size = costs.profile.boundary * batch.tokens
    links = (costs.between, costs.intra)
    wires = np.stack([link.latency + size / link.bytes_per_second for link in links])
    servers = [{costs.cluster.server_of(d) for d in stage.group} for stage in plan.stages]
    inside = [int(len(one | other) == 1) for one, other in pairwise(servers)]
    tables = {
        "forward": forward,
        "backward_input": inputs,
        "backward_weight": weights,
        "transfer": wires[inside] if inside else np.zeros((0, len(batch.tokens))),
        "activation": held,
    }
    if batch.chains:
        # The head of a slice runs its backward at once.
        cut = (batch.sliced > 0) & (again[-1] == 0)
        first, second = (
            c[:, -1] @ basis * cut for c in (costs.backward_input, costs.backward_weight)
        )
        forward[-1] += first + second
        inputs[-1] -= first + second * (1.0 - waits[-1])
        weights[-1] -= second * waits[-1]
        held[-1] -= max(0.0, kept[-1] - costs.profile.boundary) * batch.tokens * cut
        for table_ in (inputs, weights, held):  # a head alone on a stage leaves rounding only
            np.maximum(table_, 0.0, out=table_)
        chain = chain_bytes(costs.config, costs.options.tensor)
        units = [float(kind is Kind.ATTENTION) for kinds in costs.kinds for kind in kinds]
        sizes = (chain.keys_values + chain.gradients) * np.add.reduceat(units, starts)
        tables["chain_bytes"] = np.outer(sizes, batch.sliced)
    reduce, update = slab_seconds(costs, plan)
    return OpCosts(**tables, reduce=reduce, update=update, width=costs.options.width)


def slab_seconds(costs: ModelCosts, plan: Plan) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of each slab's gradient reduction (a ring over its holders) and of its update."""
    groups = [stage.group for stage in plan.stages for _ in range(stage.start, stage.stop)]
    if costs.layers.tied:
        groups.append(tuple({*plan.stages[0].group, *plan.stages[-1].group}))
    sharded = costs.options.shard_optimizer
    wires: dict[tuple[int, ...], tuple[float, float]] = {}  # of a group: seconds, and a byte
    reduce, update = [], []
    for slab, group in enumerate(groups):
        degree = len(group)
        if group not in wires:
            inside = len({costs.cluster.server_of(d) for d in group}) == 1
            link = costs.intra if inside else costs.cluster.inter
            ring = degree * costs.options.width
            turns = 2 * (ring - 1)
            wires[group] = (turns * link.latency, turns / ring / link.bytes_per_second)
        fixed, per_byte = wires[group]
        reduce.append(fixed + per_byte * costs.slab_gradients[slab])
        update.append(costs.slab_update[slab] / (degree if sharded else 1))
    return tuple(reduce), tuple(update)


def static_bytes(costs: ModelCosts, plan: Plan, batch: Batch) -> list[float]:
    """Bytes on each device of the world besides activations in flight; 0 where it is idle.

    Parameters, gradients, optimizer state (of offloaded units: none), buffers, and the transient
    memory of the largest unit at the largest micro-batch.
    """
    world = [0.0] * costs.cluster.world_size
    away = plan.o_plan.optimizer
    offloaded = np.zeros(costs.num_elements, dtype=bool)
    offloaded[list(away)] = True
    sharded = costs.options.shard_optimizer
    for stage in plan.stages:
        units = slice(stage.start, stage.stop)
        size, optimizer, _ = costs.in_range(stage.start, stage.stop)
        if away:
            optimizer = float((costs.own_optimizer[units] * ~offloaded[units]).sum())
        size += optimizer / len(stage.group) if sharded else optimizer
        for device in stage.group:
            world[device] += size
    if costs.layers.tied:
        holders = {*plan.stages[0].group, *plan.stages[-1].group}
        optimizer = costs.tied.optimizer
        size = costs.tied.state + (optimizer / len(holders) if sharded else optimizer)
        for device in holders:
            world[device] += size
    most = float(batch.tokens.max())
    for device in plan.devices:
        held = (plan.stages[s] for s in plan.stages_of(device))
        transient = max(costs.in_range(s.start, s.stop)[2] for s in held)
        world[device] += (transient + MESSAGE_BUFFERS * costs.profile.boundary) * most
        if batch.chains and device in plan.stages[-1].group:
            world[device] += max(0.0, costs.slice_head - transient) * float(batch.sliced.max())
    return world


@dataclass(frozen=True)
class Placed:
    """A plan's operations in their order, and the schedule that ordered them.

    ``stop``: with no other up to this one would they be placed otherwise.
    """

    schedule: str
    placement: Placement
    stop: float = math.inf


def place_plan(
    costs: ModelCosts,
    plan: Plan,
    batch: Batch,
    *,
    op: OpCosts | None = None,
    table: Route | None = None,
    spare: int | None = None,
    tries: int = 2,
    stop: float = math.inf,
    forward_only: bool = False,
    fixed: Sequence[float] | None = None,
) -> Placed | None:
    """Place one iteration by the schedule of the plan, or of the options where it names none.

    What is placed here is what is predicted, what programs are made from, and so what runs.

    Args:
        op: costs of its operations, if they are known.
        table: routing, if it is not the plan's own.
        spare: bytes of the whole budget that must stay free; by default the plan's own.
        tries: orders that a search looks at.
        stop: seconds that are too long: then the result is ``None``.
        fixed: :func:`static_bytes`, if they are known.
    """
    op = op_costs(costs, plan, batch) if op is None else op
    name = schedule_of(plan, costs.options)
    if forward_only:
        rule = policy("gpipe")
        placement = simulate(plan, op, rule, table=table, forward_only=True, chains=batch.chains)
        return Placed(rule.name, placement)
    free = costs.whole_budget - (plan.spare if spare is None else spare)
    fixed = static_bytes(costs, plan, batch) if fixed is None else fixed
    room = [max(0.0, free - size) for size in fixed]
    searched, split, fits = name in (SEARCHED, AUTO), None, False
    if searched:
        choice = search(
            plan, op, table=table, memory=room, tries=tries, stop=stop, chains=batch.chains
        )
        if choice is not None:
            fits = choice.fits
            split = Placed(SEARCHED, choice.placement, math.inf if fits else stop)
        if name == SEARCHED or (fits and not plan.o_plan.saves):
            return split
        name = FUSED
    rule = policy(name)
    # A fused backward keeps to its own number of micro-batches in flight, whatever the room.
    memory = room if rule.split else None
    placement = simulate(plan, op, rule, table=table, memory=memory, chains=batch.chains)
    found = Placed(name, placement, stop if searched else math.inf)
    if split is not None and fits:
        # What memory optimisation leaves may be too little in flight for halves to pay.
        over = any(p > r for p, r in zip(found.placement.peak, room, strict=False))
        if over or split.placement.makespan <= found.placement.makespan:
            return split
    return found if found.placement.makespan <= stop else split


def predict(
    costs: ModelCosts,
    plan: Plan,
    batch: Batch,
    *,
    stop: float = math.inf,
    tries: int = 2,
) -> Prediction | None:
    """Simulate one iteration; ``None`` when it does not take less than ``stop`` seconds.

    Its memory is a bound: :class:`~megatron_flex.planner.maker.Maker` knows that of the program.

    Raises :class:`PlanError` when state alone is more than a device's budget.
    """
    fixed = static_bytes(costs, plan, batch)
    short = min(costs.budget - fixed[d] for d in plan.devices)
    if short < 0:
        device = max(plan.devices, key=lambda d: fixed[d])
        raise PlanError(
            f"device {device} needs {size(fixed[device])} before any activation and may use"
            f" {size(costs.budget)}: {size(-short)} too few for the plan '{plan}'"
        )
    found = simulated(costs, plan, batch, stop=stop, tries=tries, fixed=fixed)
    if found is None:
        return None
    return prediction_of(costs, plan, batch, found[1], fixed)


def prediction_of(
    costs: ModelCosts,
    plan: Plan,
    batch: Batch,
    placed: Placed,
    fixed: Sequence[float] | None = None,
) -> Prediction:
    """Time and memory of operations that have been placed.

    ``fixed``: :func:`static_bytes`, if they are known.
    """
    fixed = static_bytes(costs, plan, batch) if fixed is None else fixed
    line = timeline(placed.placement, costs.layers)
    peaks = tuple(
        fixed[d] + (line.peak[d] if d < len(line.peak) else 0.0)
        for d in range(costs.cluster.world_size)
    )
    return Prediction(line.makespan, peaks, line, placed.schedule)


def simulated(
    costs: ModelCosts,
    plan: Plan,
    batch: Batch,
    *,
    stop: float = math.inf,
    tries: int = 2,
    fixed: Sequence[float] | None = None,
) -> tuple[float, Placed] | None:
    """Seconds of one iteration, and its placement: what a search needs of a prediction.

    ``None`` when it is not below ``stop``, or where state alone is more than a device's budget.
    ``fixed``: :func:`static_bytes`, if they are known.
    """
    fixed = static_bytes(costs, plan, batch) if fixed is None else fixed
    if min(costs.budget - fixed[d] for d in plan.devices) < 0:
        return None
    placed = place_plan(costs, plan, batch, stop=stop, tries=tries, fixed=fixed)
    if placed is None:
        return None
    seconds = iteration_seconds(placed.placement, costs.layers)
    return (seconds, placed) if seconds < stop else None
