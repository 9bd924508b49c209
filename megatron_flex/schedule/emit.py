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
from megatron_flex.schedule.placement import OpKind, Placement
from megatron_flex.schedule.shards import Cut, sharded_slabs
from megatron_flex.schedule.slabs import slab_holders, slab_stages
from megatron_flex.schedule.transition import Move, Transition

FORWARD, BACKWARD, WEIGHT = OpKind.FORWARD, OpKind.BACKWARD, OpKind.WEIGHT


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
    plan, M = problem.plan, problem.costs.num_micro_batches
    S = len(plan.stages)
    last_kind = WEIGHT if problem.split else BACKWARD
    # For each stage, the latest weight gradient on any of its replicas: as (finish, sequence).
    latest = []
    for stage in range(S):
        base = (last_kind * S + stage) * M
        latest.append(
            max((placement.finish[c], placement.sequence[c]) for c in range(base, base + M))
        )
    found = []
    for slab, (stages, group) in enumerate(
        zip(slab_stages(plan, layers), slab_holders(plan, layers), strict=True)
    ):
        ready, after = max(latest[s] for s in stages)
        members = tuple(sorted({*group, *joiners.get(slab, ())}))
        found.append(Reduction(slab, members, ready, after, slab in scattered))
    return tuple(sorted(found, key=lambda r: (r.ready, r.after, r.slab)))


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
    messages = _messages(placement)
    reduces = () if problem.forward_only else reductions(placement, layers, switch)
    moves = () if switch is None else switch.moves
    anew = {} if switch is None else switch.cuts(layers)
    gathers = {r.slab: r.group for r in reduces if r.scattered} | _gathered(anew)
    lists: list[tuple[Instruction, ...]] = []
    for device in range(world_size):
        out: list[Instruction] = _state_messages(device, (m for m in moves if m.early))
        if switch is not None:
            out += _recuts(device, switch, anew)
        _compute(out, placement, device, tokens, messages, reduces)
        own = [r for r in reduces if device in r.group]
        out.extend(SquaredNorm(r.slab) for r in own if r.scattered or r.group[0] == device)
        out.append(GlobalNorm())
        _updates(out, device, sorted(r.slab for r in own), switch, gathers)
        lists.append(tuple(out))
    if switch is None:
        return Program(plan, tokens, problem.route, tuple(lists))
    held = None if switch.plan.stages == plan.stages else switch.plan
    elements = switch.elements if anew else ()
    return Program(plan, tokens, problem.route, tuple(lists), switch.next_plan, held, elements)


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


def _messages(placement: Placement) -> dict[tuple[int, int], list[int]]:
    """For each ordered pair of devices, the operations that wait for its messages, in the order
    of sending."""
    problem = placement.problem
    route, M, S = problem.route, problem.costs.num_micro_batches, problem.costs.num_stages
    found: dict[tuple[int, int], list[int]] = {}
    for device, order in enumerate(placement.order):
        for code in order:
            rest, micro_batch = divmod(code, M)
            kind, stage = divmod(rest, S)
            if kind == FORWARD and stage + 1 < S:
                step = 1
            elif kind == BACKWARD and stage:
                step = -1
            else:
                continue
            target = route[stage + step][micro_batch]
            if target != device:
                found.setdefault((device, target), []).append(code + step * M)
    for queue in found.values():
        queue.reverse()  # the next message is at the end
    return found


def _compute(
    out: list[Instruction],
    placement: Placement,
    device: int,
    tokens: tuple[int, ...],
    messages: dict[tuple[int, int], list[int]],
    reduces: tuple[Reduction, ...],
) -> None:
    """Operations of one device with their messages and reductions."""
    problem = placement.problem
    route, M, S = problem.route, problem.costs.num_micro_batches, problem.costs.num_stages
    backward = BackwardInput if problem.split else Backward
    pending = [r for r in reversed(reduces) if device in r.group and len(r.group) > 1]
    taken: set[int] = set()
    for code in placement.order[device] if device < problem.num_devices else ():
        start, number = placement.start[code], placement.sequence[code]
        while pending and (pending[-1].ready, pending[-1].after) < (start, number):
            out.append(pending.pop().instruction())
        rest, micro_batch = divmod(code, M)
        kind, stage = divmod(rest, S)
        if kind == FORWARD and stage:
            _receive(out, code, stage - 1, device, tokens, problem.route, messages, taken)
        elif kind == BACKWARD and stage + 1 < S:
            _receive(out, code, stage + 1, device, tokens, problem.route, messages, taken)
        if kind == FORWARD:
            out.append(Forward(micro_batch, stage))
            if stage + 1 < S and (peer := route[stage + 1][micro_batch]) != device:
                out.append(SendActivation(micro_batch, stage, peer, tokens[micro_batch]))
        elif kind == BACKWARD:
            out.append(backward(micro_batch, stage))
            if stage and (peer := route[stage - 1][micro_batch]) != device:
                out.append(SendGradient(micro_batch, stage, peer, tokens[micro_batch]))
        else:
            out.append(BackwardWeight(micro_batch, stage))
    while pending:
        out.append(pending.pop().instruction())


def _receive(
    out: list[Instruction],
    code: int,
    producer: int,
    device: int,
    tokens: tuple[int, ...],
    route: tuple[tuple[int, ...], ...],
    messages: dict[tuple[int, int], list[int]],
    taken: set[int],
) -> None:
    """Receive what ``code`` needs from its producing stage, and what was sent before it."""
    peer = route[producer][code % len(tokens)]
    if peer == device or code in taken:
        return
    queue = messages[peer, device]
    while True:
        waiting = queue.pop()
        taken.add(waiting)
        rest, micro_batch = divmod(waiting, len(tokens))
        kind, stage = divmod(rest, len(route))
        if kind == FORWARD:
            out.append(RecvActivation(micro_batch, stage - 1, peer, tokens[micro_batch]))
        else:
            out.append(RecvGradient(micro_batch, stage + 1, peer, tokens[micro_batch]))
        if waiting == code:
            return
