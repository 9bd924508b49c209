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
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Drop,
    Forward,
    GatherParameters,
    GlobalNorm,
    Instruction,
    Program,
    Recut,
    RecvActivation,
    RecvGradient,
    RecvPiece,
    RecvState,
    ReduceGradient,
    ScatterGradient,
    SendActivation,
    SendGradient,
    SendPiece,
    SendState,
    SquaredNorm,
    UpdateOrSkip,
)
from megatron_flex.schedule.operations import OpKind
from megatron_flex.schedule.placement import Placement
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

    def instruction(self) -> ReduceGradient:
        """What its members do."""
        kind = ScatterGradient if self.scattered else ReduceGradient
        return kind(self.slab, self.group)


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
    senders = problem.operations.senders().tolist()
    messages = _messages(placement, senders)
    reduces = () if problem.forward_only else reductions(placement, layers, switch)
    moves = () if switch is None else switch.moves
    anew = {} if switch is None else switch.cuts(layers)
    gathers = {r.slab: r.group for r in reduces if r.scattered} | _gathered(anew)
    lists: list[tuple[Instruction, ...]] = []
    for device in range(world_size):
        out: list[Instruction] = _state_messages(device, (m for m in moves if m.early))
        if switch is not None:
            out += _recuts(device, switch, anew)
        _compute(out, placement, device, tokens, senders, messages, reduces)
        own = [r for r in reduces if device in r.group]
        out.extend(SquaredNorm(r.slab) for r in own if r.scattered or r.group[0] == device)
        out.append(GlobalNorm())
        _updates(out, device, sorted(r.slab for r in own), switch, gathers)
        lists.append(tuple(out))
    if switch is None:
        return Program(plan, tokens, problem.route, tuple(lists), chains=problem.chains)
    held = None if switch.plan.stages == plan.stages else switch.plan
    elements = switch.elements if anew else ()
    return Program(
        plan,
        tokens,
        problem.route,
        tuple(lists),
        switch.next_plan,
        held,
        elements,
        problem.chains,
    )


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
    gathers = _gathered(anew)
    return tuple(
        (
            *_state_messages(device, switch.moves),
            *_recuts(device, switch, anew),
            *(Drop(slab) for slab, devices in enumerate(switch.drops) if device in devices),
            *(GatherParameters(s, group) for s, group in gathers.items() if device in group),
        )
        for device in range(world_size)
    )


def _gathered(anew: dict[int, Cut]) -> dict[int, tuple[int, ...]]:
    """Slabs that are sharded when they have been cut anew, and their holders then."""
    return {slab: tuple(cut.after) for slab, cut in anew.items() if cut.sharded}


def _recuts(device: int, switch: Transition, anew: dict[int, Cut]) -> list[Instruction]:
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


def _state_messages(device: int, moves: Iterable[Move]) -> list[Instruction]:
    out: list[Instruction] = []
    for move in moves:
        if move.source == device:
            out.append(SendState(move.slab, move.target))
        elif move.target == device:
            out.append(RecvState(move.slab, move.source))
    return out


def _updates(
    out: list[Instruction],
    device: int,
    slabs: list[int],
    switch: Transition | None,
    gathers: dict[int, tuple[int, ...]],
) -> None:
    """The updates of one device, what it hands over after them, and what it gives up."""
    late: list[Move] = []
    dropped: list[int] = []
    if switch is not None:
        late = [m for m in switch.moves if not m.early and device in (m.source, m.target)]
        dropped = [s for s in slabs if device in switch.drops[s]]
    sent = {m.slab for m in late if m.source == device}
    # What others wait for comes first.
    slabs = [s for s in slabs if s not in dropped or s in sent]
    for slab in sorted(slabs, key=lambda s: (s not in sent, s)):
        out.append(UpdateOrSkip(slab))
        if slab in gathers:
            out.append(GatherParameters(slab, gathers[slab]))
    # What comes may need the memory of what goes.
    out.extend(Drop(slab) for slab in dropped if slab not in sent)
    out.extend(_state_messages(device, late))
    out.extend(Drop(slab) for slab in dropped if slab in sent)


def _messages(placement: Placement, senders: list[int]) -> dict[tuple[int, int], list[int]]:
    """For each ordered pair of devices, the operations that wait for its messages, in the order
    of sending."""
    device = placement.problem.operations.device.tolist()
    waiting = sorted(
        (code for code, sender in enumerate(senders) if sender >= 0),
        key=lambda code: placement.sequence[senders[code]],
    )
    found: dict[tuple[int, int], list[int]] = {}
    for code in reversed(waiting):  # the next message is at the end
        found.setdefault((device[senders[code]], device[code]), []).append(code)
    return found


def _compute(
    out: list[Instruction],
    placement: Placement,
    device: int,
    tokens: tuple[int, ...],
    senders: list[int],
    messages: dict[tuple[int, int], list[int]],
    reduces: tuple[Reduction, ...],
) -> None:
    """Operations of one device with their messages and reductions."""
    problem, ops = placement.problem, placement.problem.operations
    computes = (Forward, BackwardInput if problem.split else Backward, BackwardWeight)
    pending = [r for r in reversed(reduces) if device in r.group and len(r.group) > 1]
    taken: set[int] = set()
    order = placement.order[device].tolist() if device < problem.num_devices else []
    starts, numbers = placement.start[order].tolist(), placement.sequence[order].tolist()
    for code, start, number in zip(order, starts, numbers, strict=True):
        while pending and (pending[-1].ready, pending[-1].after) < (start, number):
            out.append(pending.pop().instruction())
        if senders[code] >= 0 and code not in taken:
            _receive(out, code, placement, tokens, senders, messages, taken)
        kind, stage, micro_batch = problem.decode(code)
        out.append(computes[kind](micro_batch, stage))
        for edge in range(ops.offset[code], ops.offset[code + 1]):
            peer = int(ops.device[ops.target[edge]])
            if peer != device:
                send = SendActivation if kind == OpKind.FORWARD else SendGradient
                out.append(send(micro_batch, stage, peer, tokens[micro_batch]))
    while pending:
        out.append(pending.pop().instruction())


def _receive(
    out: list[Instruction],
    code: int,
    placement: Placement,
    tokens: tuple[int, ...],
    senders: list[int],
    messages: dict[tuple[int, int], list[int]],
    taken: set[int],
) -> None:
    """Receive what ``code`` needs from another device, and what that sent before it."""
    problem = placement.problem
    device = problem.operations.device
    peer = int(device[senders[code]])
    queue = messages[peer, int(device[code])]
    while True:
        waiting = queue.pop()
        taken.add(waiting)
        kind, stage, micro_batch = problem.decode(senders[waiting])
        receive = RecvActivation if kind == OpKind.FORWARD else RecvGradient
        out.append(receive(micro_batch, stage, peer, tokens[micro_batch]))
        if waiting == code:
            return
