"""The predicted course of an iteration: what the planner decides on and the log compares with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_flex.model.layers import LayerList
from megatron_flex.schedule.emit import last_gradients, reductions
from megatron_flex.schedule.placement import Placement


@dataclass(frozen=True)
class Interval:
    """A reduction on a device's communication lane: seconds from the iteration's start."""

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
            if len(r.group) * costs.width < 2:
                continue
            start = max(r.ready, *(free[d] for d in r.group))
            finish = start + (costs.reduce[r.slab] if costs.reduce else 0.0)
            for device in r.group:
                free[device] = finish
                lanes[device].append(Interval(start, finish))
    norm = max(placement.makespan, *free)
    return Timeline(
        placement, tuple(map(tuple, lanes)), norm, tuple(update), norm + max(update, default=0.0)
    )


def iteration_seconds(placement: Placement, layers: LayerList) -> float:
    """:attr:`Timeline.makespan` alone, many times faster.

    All slabs of a stage are ready at once, so stages follow one another as slabs do.
    """
    problem, costs = placement.problem, placement.problem.costs
    if problem.forward_only:
        return placement.makespan
    plan = problem.plan
    latest = last_gradients(placement)
    tied = layers.tied_slab
    order = sorted(range(len(plan.stages)), key=latest.__getitem__)
    last = len(plan.stages) - 1
    tied_after = max(0, last, key=latest.__getitem__)
    free: dict[int, float] = {}
    update: dict[int, float] = {}

    def run(group: Sequence[int], slabs: Sequence[int], ready: float) -> None:
        sums: dict[float, float] = {}  # several devices have as much to update
        if costs.update:
            for device in group:
                before = update.get(device, 0.0)
                if before not in sums:
                    total = before
                    for slab in slabs:
                        total += costs.update[slab]
                    sums[before] = total
                update[device] = sums[before]
        if len(group) * costs.width < 2:
            return
        finish = max(ready, *(free.get(d, 0.0) for d in group))
        if costs.reduce:
            for slab in slabs:
                finish += costs.reduce[slab]
        for device in group:
            free[device] = finish

    for number in order:
        stage = plan.stages[number]
        run(stage.group, range(stage.start, stage.stop), latest[number][0])
        if tied is not None and number == tied_after:
            both = {*plan.stages[0].group, *plan.stages[last].group}
            run(tuple(both), (tied,), latest[number][0])
    norm = max(placement.makespan, *free.values()) if free else placement.makespan
    return norm + max(update.values(), default=0.0)
