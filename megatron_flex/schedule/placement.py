"""Operations placed on devices in time: what the simulator produces.

Inside the simulator an operation is one integer, ``(kind * stages + stage) * micro_batches +
micro_batch``, which keeps a pass over thousands of operations in the milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.routing import Route


class OpKind(IntEnum):
    """What an operation computes. ``BACKWARD`` is the input half where the backward is split."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2


@dataclass(frozen=True)
class Problem:
    """One iteration to place: a plan, its costs, its routing.

    Attributes:
        split: backward in two operations (input and weight half) instead of one.
        forward_only: no backward at all (evaluation).
    """

    plan: Plan
    costs: OpCosts
    route: Route
    split: bool = False
    forward_only: bool = False

    @property
    def num_devices(self) -> int:
        """One more than the highest device that holds a stage."""
        return self.plan.devices[-1] + 1

    @property
    def kinds(self) -> tuple[OpKind, ...]:
        """Kinds of operation that every (stage, micro-batch) goes through."""
        if self.forward_only:
            return (OpKind.FORWARD,)
        return tuple(OpKind) if self.split else (OpKind.FORWARD, OpKind.BACKWARD)

    def durations(self) -> list[float]:
        """Seconds of every operation, by its code."""
        costs = self.costs
        flat: list[float] = []
        for row in costs.forward:
            flat.extend(row)
        if self.forward_only:
            return flat
        for number, row in enumerate(costs.backward_input):
            if self.split:
                flat.extend(row)
            else:
                halves = zip(row, costs.backward_weight[number], strict=True)
                flat.extend(a + b for a, b in halves)
        if self.split:
            for row in costs.backward_weight:
                flat.extend(row)
        return flat

    def decode(self, code: int) -> tuple[OpKind, int, int]:
        """Kind, stage and micro-batch of an operation code."""
        rest, micro_batch = divmod(code, self.costs.num_micro_batches)
        kind, stage = divmod(rest, self.costs.num_stages)
        return OpKind(kind), stage, micro_batch

    def encode(self, kind: OpKind, stage: int, micro_batch: int) -> int:
        """The code of an operation."""
        costs = self.costs
        return (kind * costs.num_stages + stage) * costs.num_micro_batches + micro_batch


@dataclass(frozen=True)
class Placement:
    """Every operation with its device, order and time.

    Attributes:
        problem: what was placed.
        order: operation codes of each device, in the order they run.
        start: start of each operation in seconds, by code.
        finish: finish of each operation in seconds, by code.
        sequence: position of each operation in one order over all devices, in which every
            operation comes after all that it needs and starts do not go back in time.
        makespan: finish of the last operation, seconds.
        peak: most bytes of activations that each device holds at one time.
    """

    problem: Problem
    order: tuple[tuple[int, ...], ...]
    start: tuple[float, ...]
    finish: tuple[float, ...]
    sequence: tuple[int, ...]
    makespan: float
    peak: tuple[float, ...]

    def busy(self, device: int) -> float:
        """Seconds that a device computes."""
        return sum(self.finish[c] - self.start[c] for c in self.order[device])

    def bubble(self, device: int) -> float:
        """Fraction of the makespan that a device waits, 0 to 1."""
        return 1.0 - self.busy(device) / self.makespan if self.makespan > 0 else 0.0

    @property
    def mean_bubble(self) -> float:
        """Mean of :meth:`bubble` over the devices that hold a stage."""
        devices = self.problem.plan.devices
        return sum(map(self.bubble, devices)) / len(devices)


def positions(sequence: Sequence[int]) -> tuple[int, ...]:
    """The position of each operation code in a sequence of all codes."""
    found = [0] * len(sequence)
    for position, code in enumerate(sequence):
        found[code] = position
    return tuple(found)
