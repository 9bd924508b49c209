"""Instruction lists in plain Python: what ``kernels/src/program_emit.cpp`` must equal."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import accumulate

from megatron_flex.model.layers import LayerList
from megatron_flex.schedule.emit import (
    Reduction,
    gathered,
    recuts,
    reductions,
    state_messages,
)
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
    RecvActivation,
    RecvGradient,
    ReduceGradient,
    ScatterGradient,
    SendActivation,
    SendGradient,
    SquaredNorm,
    UpdateOrSkip,
)
from megatron_flex.schedule.operations import OpKind
from megatron_flex.schedule.placement import Placement
from megatron_flex.schedule.residency import POSTED
from megatron_flex.schedule.transition import Move, Transition


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
    plan = problem.plan
    senders = problem.operations.senders().tolist()
    messages = _messages(placement, senders)
    under_way = _under_way(placement, senders)
    reduces = () if problem.forward_only else reductions(placement, layers, switch)
    moves = () if switch is None else switch.moves
    anew = {} if switch is None else switch.cuts(layers)
    gathers = {r.slab: r.group for r in reduces if r.scattered} | gathered(anew)
    lists: list[tuple[Instruction, ...]] = []
    for device in range(world_size):
        out: list[Instruction] = state_messages(device, (m for m in moves if m.early))
        if switch is not None:
            out += recuts(device, switch, anew)
        _compute(out, placement, device, tokens, senders, messages, reduces, under_way)
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


def _instruction(r: Reduction) -> ReduceGradient:
    """What the members of a reduction do."""
    return (ScatterGradient if r.scattered else ReduceGradient)(r.slab, r.group)


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
    out.extend(state_messages(device, late))
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


def _under_way(placement: Placement, senders: list[int]) -> dict[int, int]:
    """How many of a device's messages are not taken yet when an operation of it begins."""
    ops = placement.problem.operations
    device, start, finish = ops.device.tolist(), placement.start, placement.finish
    messages = _messages(placement, senders)
    posted: dict[int, float] = {}  # of the operation that waits: when its receive is posted
    for receiver, order in enumerate(placement.order):
        times: list[float] = []  # of what the device has received
        for code in order.tolist():
            while senders[code] >= 0 and code not in posted:
                waiting = messages[device[senders[code]], receiver].pop()
                posted[waiting] = times[-POSTED] if len(times) >= POSTED else 0.0
                times.append(start[code])
    found: dict[int, int] = {}
    for sender, order in enumerate(placement.order):
        free: dict[int, float] = defaultdict(float)  # when each link is
        taken: list[float] = []
        for code in order.tolist():
            found[code] = len(taken) - bisect_left(list(accumulate(taken, max)), start[code])
            for edge in range(ops.offset[code], ops.offset[code + 1]):
                target = int(ops.target[edge])
                to = device[target]
                if to != sender:
                    begins = max(finish[code], posted[target], free[to])
                    free[to] = begins + ops.wire[edge]
                    taken.append(free[to])
    return found


def _compute(
    out: list[Instruction],
    placement: Placement,
    device: int,
    tokens: tuple[int, ...],
    senders: list[int],
    messages: dict[tuple[int, int], list[int]],
    reduces: tuple[Reduction, ...],
    under_way: dict[int, int],
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
            out.append(_instruction(pending.pop()))
        if senders[code] >= 0 and code not in taken:
            _receive(out, code, placement, tokens, senders, messages, taken)
        kind, stage, micro_batch = problem.decode(code)
        out.append(computes[kind](micro_batch, stage, under_way[code]))
        for edge in range(ops.offset[code], ops.offset[code + 1]):
            peer = int(ops.device[ops.target[edge]])
            if peer != device:
                send = SendActivation if kind == OpKind.FORWARD else SendGradient
                out.append(send(micro_batch, stage, peer, tokens[micro_batch]))
    while pending:
        out.append(_instruction(pending.pop()))


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
