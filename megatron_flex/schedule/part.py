"""One device's part of a program: all that its worker needs to know of an iteration.

A worker neither simulates nor checks: it receives its part, executes it and reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.compact import CODES, Group, Lists, begins, groups_of
from megatron_flex.schedule.instructions import (
    Forward,
    GlobalNorm,
    Instruction,
    Program,
    SendActivation,
    SendGradient,
    SendState,
)

HandOver = tuple[int, int, int]
"""Slab, source and target of a state that is handed over after the update."""


@dataclass(frozen=True)
class Part:
    """What one device does in one iteration.

    Attributes:
        device: whose part it is.
        plan: the layout that the program runs on.
        tokens: tokens of each micro-batch.
        instructions: what it does, in order.
        next_plan: the layout that it leaves behind; ``None``: the same.
        groups: the sets of devices in which any device reduces or gathers: all make them together.
        hand_overs: of all devices, in the order of the program.
        divided: of activations and their gradients that go from one set of so many neighbouring
            devices to another, each worker of a device sends a share; 0: all send them whole.
    """

    device: int
    plan: Plan
    tokens: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    next_plan: Plan | None = None
    groups: tuple[Group, ...] = ()
    hand_overs: tuple[HandOver, ...] = ()
    divided: int = 0

    @cached_property
    def sent(self) -> frozenset[tuple[int, int]]:
        """Stages and micro-batches whose outputs go to another device; others stay here."""
        sends = (i for i in self.instructions if isinstance(i, SendActivation))
        return frozenset((i.stage, i.micro_batch) for i in sends)

    @cached_property
    def returned(self) -> frozenset[tuple[int, int]]:
        """Stages and micro-batches the gradients of whose inputs go to another device."""
        sends = (i for i in self.instructions if isinstance(i, SendGradient))
        return frozenset((i.stage, i.micro_batch) for i in sends)

    @cached_property
    def read(self) -> dict[int, tuple[bool, bool]]:
        """Micro-batches in the order of need: whether their tokens, and their targets, are."""
        last = len(self.plan.stages) - 1
        found: dict[int, tuple[bool, bool]] = {}
        for op in self.instructions:
            if isinstance(op, Forward):
                inputs, targets = found.get(op.micro_batch, (False, False))
                found[op.micro_batch] = inputs or op.stage == 0, targets or op.stage == last
        return found


def part_of(program: Program, device: int, divided: int = 0) -> Part:
    """The part of ``device``."""
    return Part(
        device,
        program.plan,
        program.tokens,
        program.instructions[device],
        program.next_plan,
        groups_of(program.instructions),
        hand_overs(program),
        divided,
    )


def hand_overs(program: Program) -> tuple[HandOver, ...]:
    """What is handed over after the update, by source."""
    found: list[HandOver] = []
    if program.next_plan is None:
        return ()
    lists = Lists.of(program.instructions, program.tokens)
    for source in range(len(lists)):
        words = lists.of_device(source)
        words = words[begins(words)]
        codes = words & np.uint64(63)
        norm = np.flatnonzero(codes == CODES[GlobalNorm])
        after = np.arange(len(words)) > (norm[-1] if len(norm) else -1)
        for word in words[after & (codes == CODES[SendState])].tolist():
            found.append((word >> 6 & 0x3FFFF, source, word >> 24 & 0xFFFFF))
    return tuple(found)
