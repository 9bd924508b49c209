"""Operations placed on devices in time: what the simulator produces.

Inside the simulator an operation is one integer, ``(kind * stages + stage) * micro_batches +
micro_batch``, which keeps a pass over thousands of operations in the milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

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

    @cached_property
    def route_array(self) -> NDArray[np.int64]:
        """The routing, ``[stages, micro_batches]``."""
        return np.array(self.route, dtype=np.int64)

    @cached_property
    def durations(self) -> NDArray[np.float64]:
        """Seconds of every operation, by its code."""
        tables = self.costs.arrays
        forward, first, second = (
            tables[name] for name in ("forward", "backward_input", "backward_weight")
        )
        if self.forward_only:
            return forward.ravel()
        parts = [forward, first, second] if self.split else [forward, first + second]
        return np.concatenate([part.ravel() for part in parts])

    @cached_property
    def tolerance(self) -> float:
        """Seconds that rounding may come to: events that are closer happen at the same time.

        So that rounding does not decide which of two ready operations a device takes.
        """
        return 1e-9 * float(self.durations.mean())

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
