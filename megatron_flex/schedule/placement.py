"""Operations placed on devices in time: what the simulator produces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.operations import Floats, Integers, Operations, OpKind, operations
from megatron_flex.schedule.routing import Route


@dataclass(frozen=True)
class Problem:
    """One iteration to place: a plan, its costs, its routing.

    Attributes:
        split: backward in two operations (input and weight half) instead of one.
        forward_only: no backward at all (evaluation).
        chains: micro-batches that hold the slices of one sample, in order.
    """

    plan: Plan
    costs: OpCosts
    route: Route
    split: bool = False
    forward_only: bool = False
    chains: tuple[tuple[int, ...], ...] = ()

    @property
    def num_devices(self) -> int:
        """One more than the highest device that holds a stage."""
        return self.plan.devices[-1] + 1

    @cached_property
    def route_array(self) -> NDArray[np.int64]:
        """The routing, ``[stages, micro_batches]``."""
        return np.array(self.route, dtype=np.int64)

    @cached_property
    def operations(self) -> Operations:
        """What there is to place."""
        return operations(
            self.costs,
            self.route_array,
            self.num_devices,
            split=self.split,
            forward_only=self.forward_only,
            chains=self.chains,
        )

    @cached_property
    def tolerance(self) -> float:
        """Seconds that rounding may come to: events that are closer happen at the same time.

        So that rounding does not decide which of two ready operations a device takes.
        """
        return 1e-9 * float(self.operations.seconds.mean())

    def decode(self, code: int) -> tuple[OpKind, int, int]:
        """Kind, stage and micro-batch of an operation code."""
        rest, micro_batch = divmod(int(code), self.costs.num_micro_batches)
        kind, stage = divmod(rest, self.costs.num_stages)
        return OpKind(kind), stage, micro_batch

    def encode(self, kind: OpKind, stage: int, micro_batch: int) -> int:
        """The code of an operation."""
        costs = self.costs
        return (kind * costs.num_stages + stage) * costs.num_micro_batches + micro_batch


@dataclass(frozen=True, eq=False)
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
        peak: most bytes of activations that each device holds at one time; of a chain all that it
            is admitted with.
    """

    problem: Problem
    order: tuple[Integers, ...]
    start: Floats
    finish: Floats
    sequence: Integers
    makespan: float
    peak: tuple[float, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return (
            self.problem == other.problem
            and self.peak == other.peak
            and all(map(np.array_equal, self.order, other.order))
            and np.array_equal(self.start, other.start)
            and np.array_equal(self.finish, other.finish)
            and np.array_equal(self.sequence, other.sequence)
        )

    __hash__ = None  # type: ignore[assignment]

    def busy(self, device: int) -> float:
        """Seconds that a device computes."""
        own = self.order[device]
        return float((self.finish[own] - self.start[own]).sum())

    def bubble(self, device: int) -> float:
        """Fraction of the makespan that a device waits, 0 to 1."""
        return 1.0 - self.busy(device) / self.makespan if self.makespan > 0 else 0.0

    @property
    def mean_bubble(self) -> float:
        """Mean of :meth:`bubble` over the devices that hold a stage."""
        devices = self.problem.plan.devices
        return sum(map(self.bubble, devices)) / len(devices)


def positions(sequence: Integers) -> Integers:
    """The position of each operation code in a sequence of all codes."""
    found = np.empty_like(sequence)
    found[sequence] = np.arange(len(sequence))
    return found
