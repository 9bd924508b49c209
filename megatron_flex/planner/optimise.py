"""O_plan: which elements are recomputed or go to the host, so that every device fits.

The searches price memory optimisation by its linear relaxation (:mod:`cost`); here whole elements
are chosen. Greedy in the order of price (seconds a byte), with the cheapest single finish at every
point, then what is not needed is taken back: at most one element above the relaxation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_flex.planner.cost import Group, Savings, group_cost, savings
from megatron_flex.planner.plan import OPlan
from megatron_flex.planner.tables import Tables


@dataclass(frozen=True)
class Step:
    """One thing to do for one element: (bytes saved, seconds) on top of the steps before it."""

    element: int
    action: str  # recompute, optimizer, activations
    size: float
    seconds: float
    after: int | None = None  # index of the step that this one replaces


@dataclass(frozen=True)
class GroupOptimisation:
    """What one group does.

    Attributes:
        recompute, optimizer, activations: elements, ascending.
        recomputed: bytes of activations that recompute saves on the fullest replica (its r).
        offloaded: bytes that offload saves there (its s).
        recompute_seconds, swap_seconds: what they add to the busiest replica.
    """

    recompute: tuple[int, ...] = ()
    optimizer: tuple[int, ...] = ()
    activations: tuple[int, ...] = ()
    recomputed: float = 0.0
    offloaded: float = 0.0
    recompute_seconds: float = 0.0
    swap_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds that it adds."""
        return self.recompute_seconds + self.swap_seconds


def optimise(
    t: Tables, group: Group, missing: float | None = None, *, whole: bool = False
) -> GroupOptimisation:
    """The O_plan of one group; nothing when it fits as it is, infinite seconds when it cannot.

    Args:
        missing: bytes to save; by default those that the memory model says.
        whole: do all that is possible, whatever it saves.
    """
    if missing is None:
        missing = group_cost(t, group).missing
    if missing <= 0 and not whole:
        return GroupOptimisation()
    can = _savings(t, group)
    steps = _steps(can)
    chosen = list(range(len(steps))) if whole else _choose(steps, missing)
    if chosen is None:
        return GroupOptimisation(recompute_seconds=math.inf)
    taken = {(steps[i].element, steps[i].action) for i in chosen}
    return _summary(can, taken, steps)


def _savings(t: Tables, group: Group) -> dict[int, Savings]:
    """What can be done with each element of a group, in order."""
    return {
        element: savings(t, begin, element, len(group.of_chunk(number)))
        for number, (begin, end) in enumerate(group.chunks)
        for element in range(begin, end)
    }


def optimised(t: Tables, group: Group, o: OPlan) -> GroupOptimisation:
    """What a given O_plan does in one group."""
    element = {unit: e for e in group.elements for unit in range(t.points[e], t.points[e + 1])}
    taken = {
        (element[unit], action)
        for action in ("recompute", "optimizer", "activations")
        for unit in getattr(o, action)
        if unit in element
    }
    return _summary(_savings(t, group), taken, ())


def _steps(possible: Mapping[int, Savings]) -> list[Step]:
    """All steps, cheapest bytes first; a step that replaces another comes after it."""
    steps: list[Step] = []
    for element, can in possible.items():
        if can.optimizer is not None:
            steps.append(Step(element, "optimizer", *can.optimizer))
        either = [
            (action, value)
            for action, value in (
                ("recompute", can.recompute),
                ("activations", can.activations),
            )
            if value is not None and value[0] > 0
        ]
        either.sort(key=lambda e: (e[1][0], -e[1][1]))
        if len(either) == 2:
            (_, (b0, s0)), (_, (b1, s1)) = either
            if s1 <= s0:
                del either[0]  # more bytes for no more time
            elif b1 <= b0:
                del either[1]
            elif s0 * b1 >= s1 * b0:
                del either[0]  # above the line to the other: never the cheaper choice
        if either:
            action, (size, seconds) = either[0]
            steps.append(Step(element, action, size, seconds))
        if len(either) == 2:
            action, (more, longer) = either[1]
            before = len(steps) - 1
            steps.append(Step(element, action, more - size, longer - seconds, before))
    order = sorted(
        (i for i in range(len(steps)) if steps[i].size > 0),
        key=lambda i: (steps[i].seconds / steps[i].size, i),
    )
    place = {old: new for new, old in enumerate(order)}
    return [
        Step(s.element, s.action, s.size, s.seconds, None if s.after is None else place[s.after])
        for s in (steps[i] for i in order)
    ]


def _choose(steps: Sequence[Step], missing: float) -> list[int] | None:
    """Indices of the steps to take, or ``None`` when all together save too little."""
    best: list[int] | None = None
    best_seconds = math.inf
    taken: list[int] = []
    saved = spent = 0.0
    for i in range(len(steps)):
        # Finish here with the cheapest single step that is enough.
        for j in range(i, len(steps)):
            s = steps[j]
            ready = s.after is None or s.after < i
            if ready and saved + s.size >= missing and spent + s.seconds < best_seconds:
                best, best_seconds = [*taken, j], spent + s.seconds
        taken.append(i)
        saved += steps[i].size
        spent += steps[i].seconds
        if saved >= missing:
            break
    if best is None:
        return None
    # Take back what is not needed, dearest first.
    total = sum(steps[i].size for i in best)
    for i in sorted(best, key=lambda i: -steps[i].seconds):
        needed = any(steps[j].after == i for j in best)
        if not needed and total - steps[i].size >= missing:
            best.remove(i)
            total -= steps[i].size
    return best


def _summary(
    possible: Mapping[int, Savings], taken: set[tuple[int, str]], steps: Sequence[Step]
) -> GroupOptimisation:
    # Where a replacing step is taken, the replaced one is not done.
    for step in steps:
        if step.after is not None and (step.element, step.action) in taken:
            taken.discard((step.element, steps[step.after].action))
    elements = {
        action: tuple(sorted(e for e, a in taken if a == action))
        for action in ("recompute", "optimizer", "activations")
    }
    sums = dict.fromkeys(elements, (0.0, 0.0))
    for element, can in possible.items():
        for action, value in (
            ("recompute", can.recompute),
            ("optimizer", can.optimizer),
            ("activations", can.activations),
        ):
            if element in elements[action] and value is not None:
                size, seconds = sums[action]
                sums[action] = (size + value[0], seconds + value[1])
    return GroupOptimisation(
        **elements,
        recomputed=sums["recompute"][0],
        offloaded=sums["optimizer"][0] + sums["activations"][0],
        recompute_seconds=sums["recompute"][1],
        swap_seconds=sums["optimizer"][1] + sums["activations"][1],
    )


def o_plan(t: Tables, parts: Sequence[GroupOptimisation]) -> OPlan:
    """The groups' choices together, in units."""

    def units(name: str) -> tuple[int, ...]:
        elements = sorted({e for part in parts for e in getattr(part, name)})
        return tuple(u for e in elements for u in range(t.points[e], t.points[e + 1]))

    return OPlan(units("recompute"), units("optimizer"), units("activations"))
