"""V-Half and V-Min: a V in a half and a third of 1F1B's memory.

Qi et al., "Pipeline Parallelism with Controllable Memory" (2024). Every micro-batch goes through
the V by one *building block*: how many slots after its first forward each of its passes begins on
each device, repeated every six slots. How long the activations of a block live is what memory is
held. Between the blocks' passes weight halves fill the free slots; before the first backward and
after the last forward, passes move to earlier free slots within the memory of the steady state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from megatron_flex.schedule.operations import OpKind
from megatron_flex.schedule.placement import Problem
from megatron_flex.schedule.policies.policy import (
    Limits,
    Orders,
    Policy,
    Shape,
    backward_first,
    pipeline_memory,
)
from megatron_flex.schedule.policies.zero_bubble_v import is_v

PERIOD = 6
"""Slots from one micro-batch to the next: two forwards, two input halves, two weight halves."""
DOWN, UP, BACK_UP, BACK_DOWN, WEIGHT = range(5)
"""Passes of a micro-batch on a device, in their order: forward on the way down and up the V, input
halves the same way back, and the weight halves, which come in the order of the input halves."""

Block = Callable[[int, int], tuple[int, int, int, int]]
Slots = list[list[list[int]]]
"""``slots[device][pass][micro_batch]``"""


def half_block(device: int, devices: int) -> tuple[int, int, int, int]:
    """V-Half's block: two slots from device to device on the way down, one on the way back."""
    gap = 3 if devices % 2 == 0 else 0  # so that no two passes meet in a slot
    return (
        2 * device,
        3 * devices - device - 2,
        3 * devices + gap + 2 * device - 1,
        6 * devices + gap - device - 2,
    )


def min_block(device: int, devices: int) -> tuple[int, int, int, int]:
    """V-Min's block: one slot from device to device both ways."""
    gap = 2 if devices % 3 == 0 else 0
    return (
        device,
        2 * devices - device - 1,
        2 * devices + gap + device,
        4 * devices + gap - device - 1,
    )


@lru_cache(64)
def block_order(
    block: Block, devices: int, batches: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each device its passes in order, as (pass, number of the micro-batch).

    Weight halves are told apart: ``WEIGHT`` is that of the stage on the way up, ``WEIGHT + 1`` that
    on the way down.
    """
    slots = [
        [[start + PERIOD * m for m in range(batches)] for start in block(d, devices)]
        for d in range(devices)
    ]
    slots = _squeezed(_pulled([_with_weights(own) for own in slots], steady=False))
    slots = _squeezed(
        [_with_weights(own) for own in _pulled([own[:WEIGHT] for own in slots], steady=True)]
    )
    return tuple(_as_order(own[:WEIGHT]) for own in slots)


def _sequence(slots: Slots) -> list[tuple[int, int, int, int]]:
    """All passes of all devices by time: slot, device, pass, micro-batch."""
    return sorted(
        (slot, device, kind, m)
        for device, own in enumerate(slots)
        for kind, row in enumerate(own)
        for m, slot in enumerate(row)
    )


def _weights(passes: Sequence[Sequence[int]]) -> list[int]:
    """The slots of the weight halves: each free slot that finds one waiting."""
    taken = sorted(slot for row in passes[:WEIGHT] for slot in row)
    ends = sorted((*passes[BACK_UP], *passes[BACK_DOWN]))
    busy, begun = set(taken), 0
    found: list[int] = []
    slot = 0
    while len(found) < len(ends):
        if slot not in busy:
            while begun < len(ends) and ends[begun] < slot:
                begun += 1
            if len(found) < begun:
                found.append(slot)
        slot += 1
    return found


def _with_weights(passes: Sequence[Sequence[int]]) -> list[list[int]]:
    return [*map(list, passes[:WEIGHT]), _weights(passes)]


def _peak(passes: Sequence[Sequence[int]]) -> int:
    """Most activations held at a time: from a forward to a weight half."""
    weights = passes[WEIGHT] if len(passes) > WEIGHT else _weights(passes)
    held = most = 0
    steps = [(slot, 1) for row in passes[:BACK_UP] for slot in row] + [(s, -1) for s in weights]
    for _, step in sorted(steps):
        held += step
        most = max(most, held)
    return most


def _ready(slots: Slots, device: int, kind: int, m: int) -> int:
    """The slot of the last pass that a pass waits for; -1 for none."""
    own = slots[device]
    found = own[kind][m - 1] if m else -1
    if kind == WEIGHT:
        return max(found, sorted((*own[BACK_UP], *own[BACK_DOWN]))[m])
    before = device - 1 if kind in (DOWN, BACK_UP) else device + 1
    if 0 <= before < len(slots):
        found = max(found, slots[before][kind][m])
    if kind:
        found = max(found, own[kind - 1][m])
    return found


def _pulled(slots: Slots, *, steady: bool) -> Slots:
    """Move passes before and after the steady state to earlier free slots within the memory.

    ``steady``: only those after it.
    """
    most = max(map(_peak, slots))
    busy = [{slot for row in own for slot in row} for own in slots]
    last = len(slots[0][DOWN]) - 1
    begun = ended = False
    for slot, device, kind, m in _sequence(slots):
        begun = begun or (device == 0 and kind == BACK_DOWN)
        fixed = not ended and (begun or steady)
        ended = ended or (begun and kind == DOWN and m == last)
        if fixed:
            continue
        own = slots[device]
        for earlier in range(_ready(slots, device, kind, m) + 1, slot):
            if earlier in busy[device]:
                continue
            own[kind][m] = earlier
            if _peak(own) <= most:
                busy[device].discard(slot)
                busy[device].add(earlier)
                break
            own[kind][m] = slot
    return slots


def _squeezed(slots: Slots) -> Slots:
    """The same order of passes on every device, each in the first slot that it can have."""
    found = [[[0] * len(row) for row in own] for own in slots]
    free = [0] * len(slots)
    for _, device, kind, m in _sequence(slots):
        at = max(free[device], _ready(found, device, kind, m) + 1)
        if kind == WEIGHT:  # the input halves before it are placed, those after it may not be
            at = max(free[device], found[device][kind][m - 1] + 1 if m else 0)
        found[device][kind][m] = at
        free[device] = at + 1
    return found


def _as_order(passes: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Passes by time; weight halves of both stages, in the slots that are free for them."""
    steps = sorted((slot, kind, m) for kind, row in enumerate(passes) for m, slot in enumerate(row))
    order: list[tuple[int, int]] = []
    waiting: list[list[int]] = [[], []]

    def weight() -> None:
        which = 0 if waiting[0] else 1
        order.append((WEIGHT + which, waiting[which].pop(0)))

    slot = 0
    for at, kind, m in steps:
        while slot < at:
            if any(waiting):
                weight()
            slot += 1
        order.append((kind, m))
        if kind >= BACK_UP:
            waiting[kind - BACK_UP].append(m)
        slot = at + 1
    while any(waiting):
        weight()
    return tuple(order)


def order(block: Block, problem: Problem, turn: Sequence[int]) -> Orders | None:
    """The published order for every device of a V."""
    plan = problem.plan
    if not (problem.split and is_v(plan)):
        return None
    half = len(plan.stages) // 2
    orders: list[list[int]] = [[] for _ in range(problem.num_devices)]
    for number in range(half):
        down, up = number, 2 * half - 1 - number
        steps = (
            (OpKind.FORWARD, down), (OpKind.FORWARD, up), (OpKind.BACKWARD, up),
            (OpKind.BACKWARD, down), (OpKind.WEIGHT, up), (OpKind.WEIGHT, down),
        )  # fmt: skip
        bases = [problem.encode(kind, stage, 0) for kind, stage in steps]
        for device in plan.stages[number].group:
            own = [m for m in turn if problem.route[number][m] == device]
            if own:
                passes = block_order(block, half, len(own))[number]
                orders[device] = [bases[kind] + own[m] for kind, m in passes]
    return orders


def _limits(part: float, problem: Problem) -> Limits:
    """A part of one pipeline's memory, and at least one micro-batch on both stages."""
    whole = pipeline_memory(problem)
    activation = problem.costs.activation.sum(axis=0).max()
    memory = tuple(max(part * size, float(activation)) for size in whole)
    return Limits(Limits.none(problem).in_flight, memory)


V_HALF = Policy(
    "v-half", split=True, rank=backward_first, limits=partial(_limits, 1 / 2), placement=Shape.V,
    order=partial(order, half_block),
)  # fmt: skip
V_MIN = Policy(
    "v-min", split=True, rank=backward_first, limits=partial(_limits, 1 / 3), placement=Shape.V,
    order=partial(order, min_block),
)  # fmt: skip
