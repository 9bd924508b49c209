"""The predicted course of an iteration: what the planner decides on and the log compares with."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flex.model.layers import LayerList
from megatron_flex.schedule.emit import reductions
from megatron_flex.schedule.placement import Placement


@dataclass(frozen=True)
class Interval:
    """Something on a device's communication or update lane: seconds from the iteration's start."""

    label: str
    start: float
    finish: float


@dataclass(frozen=True)
class Timeline:
    """Predicted times of one iteration.

    Attributes:
        placement: every operation with start and finish, bubbles, peak activation bytes.
        reduces: the reductions of each device, in the order of issue.
        norm: second at which all devices have met at ``GlobalNorm``.
        update: seconds of each device's optimizer updates, which follow ``norm``.
        makespan: seconds of the whole iteration.
    """

    placement: Placement
    reduces: tuple[tuple[Interval, ...], ...]
    norm: float
    update: tuple[float, ...]
    makespan: float

    @property
    def peak(self) -> tuple[float, ...]:
        """Most bytes of activations that each device holds at one time."""
        return self.placement.peak

    def bubble(self, device: int) -> float:
        """Fraction of the iteration in which a device neither computes nor updates."""
        if self.makespan <= 0:
            return 0.0
        return 1.0 - (self.placement.busy(device) + self.update[device]) / self.makespan


def timeline(placement: Placement, layers: LayerList) -> Timeline:
    """Add reductions, the global norm and updates to placed operations.

    A reduction starts when all holders are ready and have finished their earlier reductions; it
    overlaps with computing. The norm waits for all of it; the updates come after.
    """
    problem, costs = placement.problem, placement.problem.costs
    D = problem.num_devices
    free = [0.0] * D
    lanes: list[list[Interval]] = [[] for _ in range(D)]
    update = [0.0] * D
    if not problem.forward_only:
        for r in reductions(placement, layers):
            for device in r.group:
                update[device] += costs.update[r.slab] if costs.update else 0.0
            if len(r.group) < 2:
                continue
            start = max(r.ready, *(free[d] for d in r.group))
            finish = start + (costs.reduce[r.slab] if costs.reduce else 0.0)
            for device in r.group:
                free[device] = finish
                lanes[device].append(Interval(f"slab {r.slab}", start, finish))
    norm = max(placement.makespan, *free)
    return Timeline(
        placement, tuple(map(tuple, lanes)), norm, tuple(update), norm + max(update, default=0.0)
    )
