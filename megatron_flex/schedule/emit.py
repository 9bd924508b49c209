"""From placed operations to instruction lists.

Order is what makes the lists safe without tags or time-outs. All instructions follow one order
over all devices (start of operations in the simulated time), hence:

- a send comes right after the operation that produced it; a receive right before the operation
  that needs it, together with earlier messages of the same sender that have not been taken yet.
  So for each ordered pair of devices both ends list their messages in the same order.
- a reduction stands at the simulated time at which its last holder is ready, on all its holders.
  Two devices that share two reductions list them in the same order, and one that is early goes
  on computing until the others are ready.
- a switch to another plan begins with all early copies of state, which travel on their own while
  the iteration computes; what is handed over follows the update of its slab.
- parameters of sharded slabs are gathered in the order of slabs.
- an operation waits until messages that its device has sent are taken, so that it is certain what
  memory they hold (``Compute.under_way``): those that by the simulated times are taken before it
  begins. A peer can take a message when it has posted the receive, and it posts some ahead
  (:data:`~megatron_flex.schedule.residency.POSTED`). So this waits for what starts strictly earlier
  in that one order, and cannot close a circle; by the simulated times it waits for nothing.

Lists are written in native code (``kernels/src/program_emit.cpp``); the tests have it in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_flex.model.layers import LayerList
from megatron_flex.native import Array, function, pointers, structure
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.compact import Lists, rows
from megatron_flex.schedule.instructions import (
    Drop,
    GatherParameters,
    Instruction,
    Program,
    Recut,
    RecvPiece,
    RecvState,
    SendPiece,
    SendState,
)
from megatron_flex.schedule.placement import Placement
from megatron_flex.schedule.residency import POSTED
from megatron_flex.schedule.shards import Cut, sharded_slabs
from megatron_flex.schedule.slabs import slab_holders, slab_stages
from megatron_flex.schedule.transition import Move, Transition


@dataclass(frozen=True)
class Reduction:
    """A slab's gradient reduction: who takes part, and its place in the order of everything.

    ``ready`` is the second at which the last holder has its gradient, ``after`` the sequence
    number of the operation that made it so (-1 if none computes on the slab). ``scattered``: each
    member gets its own part only.
    """

    slab: int
    group: tuple[int, ...]
    ready: float
    after: int
    scattered: bool = False


def reductions(
    placement: Placement, layers: LayerList, switch: Transition | None = None
) -> tuple[Reduction, ...]:
    """The reduction of every slab (also of those with one holder), in the order of issue.

    Devices that join a slab early take part.
    """
    joiners: dict[int, tuple[int, ...]] = {}
    problem = placement.problem
    scattered = sharded_slabs(problem.plan if switch is None else switch.plan, layers)
    if switch is not None:
        anew = switch.cuts(layers)
        joiners = switch.joiners | {slab: tuple(cut.after) for slab, cut in anew.items()}
        scattered -= anew.keys()
    plan = problem.plan
    latest = last_gradients(placement)
    found = []
    for slab, (stages, group) in enumerate(
        zip(slab_stages(plan, layers), slab_holders(plan, layers), strict=True)
    ):
        ready, after = max(latest[s] for s in stages)
        members = tuple(sorted({*group, *joiners.get(slab, ())}))
        found.append(Reduction(slab, members, ready, after, slab in scattered))
    return tuple(sorted(found, key=lambda r: (r.ready, r.after, r.slab)))


def last_gradients(placement: Placement) -> list[tuple[float, int]]:
    """For each stage, the latest weight gradient on any replica: its finish and its sequence."""
    costs = placement.problem.costs
    S, M = shape = costs.num_stages, costs.num_micro_batches
    last = slice(-S * M, None)
    finish = placement.finish[last].reshape(shape)
    latest = finish.max(axis=1, keepdims=True)
    number = np.where(finish == latest, placement.sequence[last].reshape(shape), -1)
    return list(zip(latest[:, 0].tolist(), number.max(axis=1).tolist(), strict=True))


_Problem = structure(
    "stages batches kinds placed devices slabs reductions moves recuts pieces drops posted",
    arrays="device offset target wire order_offset order sequence start finish reduced ready after"
    " scattered reduce_group member_offset member gather_group move recut piece drop words"
    " word_offset",
)
"""``mflex_emit_problem`` of ``kernels/src/program_emit.cpp``, field by field."""


def emit(
    placement: Placement,
    layers: LayerList,
    tokens: tuple[int, ...],
    world_size: int,
    switch: Transition | None = None,
) -> Program:
    """The instruction lists of devices ``0 .. world_size - 1``.

    Args:
        tokens: tokens of each micro-batch, the sizes of the messages.
        world_size: number of devices; those without a stage only take part in ``GlobalNorm``.
        switch: the change to the next iteration's plan; ``None`` keeps the plan.
    """
    problem = placement.problem
    plan, costs = problem.plan, problem.costs
    plan.check(layers.num_units, world_size)
    if len(tokens) != costs.num_micro_batches:
        raise ValueError(
            f"{len(tokens)} micro-batches have tokens, but {costs.num_micro_batches} have costs"
        )
    if switch is not None:
        if not _refines(plan, switch.plan):
            raise ValueError(f"the switch starts from '{switch.plan}', the program is on '{plan}'")
        switch.next_plan.check(layers.num_units, world_size)
    reduces = () if problem.forward_only else reductions(placement, layers, switch)
    anew = {} if switch is None else switch.cuts(layers)
    gathers = {r.slab: r.group for r in reduces if r.scattered} | gathered(anew)
    lists = _write(placement, layers, tokens, world_size, switch, reduces, anew, gathers)
    if switch is None:
        return Program(plan, tokens, problem.route, lists, chains=problem.chains)
    held = None if switch.plan.stages == plan.stages else switch.plan
    elements = switch.elements if anew else ()
    return Program(
        plan, tokens, problem.route, lists, switch.next_plan, held, elements, problem.chains
    )


def _write(
    placement: Placement,
    layers: LayerList,
    tokens: tuple[int, ...],
    world_size: int,
    switch: Transition | None,
    reduces: Sequence[Reduction],
    anew: Mapping[int, Cut],
    gathers: Mapping[int, tuple[int, ...]],
) -> Lists:
    """Let native code write the lists."""
    ops = placement.problem.operations
    groups = sorted({r.group for r in reduces if len(r.group) > 1} | {*gathers.values()})
    number = {group: i for i, group in enumerate(groups)}
    gather = np.full(layers.num_slabs, -1)
    for slab, group in gathers.items():
        gather[slab] = number[group]
    moves = () if switch is None else switch.moves
    pieces = () if switch is None else switch.pieces
    drops = () if switch is None else switch.drops
    recuts = [(d, slab, *cut.after[d]) for slab, cut in anew.items() for d in cut.changed]
    dropped = [(slab, d) for slab, devices in enumerate(drops) for d in devices]
    order_offset, order = rows(placement.order)
    member_offset, member = rows(r.group for r in reduces)
    # A reduction's member may reduce, count, update, gather and drop.
    most = len(order) + 2 * len(ops.target) + 5 * len(member) + world_size
    most += 2 * len(moves) + 3 * len(recuts) + 6 * len(pieces)
    words = np.empty(most, dtype=np.uint64)
    word_offset = np.zeros(world_size + 1, dtype=np.int64)
    arrays: dict[str, Array] = {
        **{
            name: np.ascontiguousarray(getattr(ops, name))
            for name in ("device", "offset", "target", "wire")
        },
        "order_offset": order_offset,
        "order": order,
        "sequence": np.ascontiguousarray(placement.sequence),
        "start": np.ascontiguousarray(placement.start),
        "finish": np.ascontiguousarray(placement.finish),
        "reduced": np.array([r.slab for r in reduces], dtype=np.int64),
        "ready": np.array([r.ready for r in reduces], dtype=np.float64),
        "after": np.array([r.after for r in reduces], dtype=np.int64),
        "scattered": np.array([r.scattered for r in reduces], dtype=np.int64),
        "reduce_group": np.array([number.get(r.group, -1) for r in reduces], dtype=np.int64),
        "member_offset": member_offset,
        "member": member,
        "gather_group": gather,
        "move": np.array([(m.slab, m.source, m.target, m.early) for m in moves], dtype=np.int64),
        "recut": np.array(recuts, dtype=np.int64),
        "piece": np.array(
            [(p.slab, p.source, p.target, p.start, p.stop) for p in pieces], dtype=np.int64
        ),
        "drop": np.array(dropped, dtype=np.int64),
        "words": words,
        "word_offset": word_offset,
    }
    native = _Problem(
        stages=ops.stages,
        batches=ops.batches,
        kinds=ops.kinds,
        placed=len(placement.order),
        devices=world_size,
        slabs=layers.num_slabs,
        reductions=len(reduces),
        moves=len(moves),
        recuts=len(recuts),
        pieces=len(pieces),
        drops=len(dropped),
        posted=POSTED,
        **pointers(arrays),
    )
    function("mflex_program_emit")(ctypes.addressof(native))
    return Lists(words[: word_offset[-1]], word_offset, groups, tokens)


def _refines(plan: Plan, whole: Plan) -> bool:
    """Whether ``plan`` is ``whole``, or its stages in pieces on the same and more devices."""
    if plan.stages == whole.stages:
        return True
    return all(
        any(w.start <= p.start and p.stop <= w.stop and set(w.group) <= set(p.group)
            for w in whole.stages)
        for p in plan.stages
    )  # fmt: skip


def switch_only(
    switch: Transition, layers: LayerList, world_size: int
) -> tuple[tuple[Instruction, ...], ...]:
    """Lists for a switch between two iterations, while nothing computes."""
    anew = switch.cuts(layers)
    gathers = gathered(anew)
    return tuple(
        (
            *state_messages(device, switch.moves),
            *recuts(device, switch, anew),
            *(Drop(slab) for slab, devices in enumerate(switch.drops) if device in devices),
            *(GatherParameters(s, group) for s, group in gathers.items() if device in group),
        )
        for device in range(world_size)
    )


def gathered(anew: dict[int, Cut]) -> dict[int, tuple[int, ...]]:
    """Slabs that are sharded when they have been cut anew, and their holders then."""
    return {slab: tuple(cut.after) for slab, cut in anew.items() if cut.sharded}


def recuts(device: int, switch: Transition, anew: dict[int, Cut]) -> list[Instruction]:
    """What a device does at first for the slabs that are cut anew."""
    out: list[Instruction] = [
        Recut(slab, *cut.after[device]) for slab, cut in anew.items() if device in cut.changed
    ]
    for p in switch.pieces:
        if p.source == device:
            out.append(SendPiece(p.slab, p.target, p.start, p.stop))
        elif p.target == device:
            out.append(RecvPiece(p.slab, p.source, p.start, p.stop))
    return out


def state_messages(device: int, moves: Iterable[Move]) -> list[Instruction]:
    """What a device sends and receives of whole slabs."""
    out: list[Instruction] = []
    for move in moves:
        if move.source == device:
            out.append(SendState(move.slab, move.target))
        elif move.target == device:
            out.append(RecvState(move.slab, move.source))
    return out
