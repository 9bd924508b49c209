"""Refines a plan's cuts by simulation: units move between neighbouring stages while it pays.

The searches know a closed form; V templates also fix how the two passes are paired. A few steps of
descent on the simulated schedule recover most of what that costs (docs/planner.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.planner.pricing import Price, Pricer
from megatron_flex.planner.simulation import Prediction


def refine(
    pricer: Pricer, price: Price, simulated: Prediction, simulations: int
) -> tuple[Price, Prediction]:
    """The best plan found with at most ``simulations`` more simulations; never a slower one.

    Boundaries next to the device that is busy longest are tried first.
    """
    best, best_time = price, simulated
    tried = {best.plan.stages}
    left = simulations
    improved = True
    while improved and left > 0:
        improved = False
        for plan in _neighbours(best.plan, best_time):
            if left == 0:
                break
            if plan.stages in tried:
                continue
            tried.add(plan.stages)
            moved = pricer.price(plan)
            if not moved.fits:
                continue
            left -= 1
            time = pricer.simulate(moved, stop=best_time.seconds)
            if time is not None and time.seconds < best_time.seconds:
                best, best_time = moved, time
                improved = True
                break
    return best, best_time


def _neighbours(plan: Plan, simulated: Prediction) -> Iterator[Plan]:
    """Plans with one boundary moved by a unit, away from the busiest devices first."""
    busy = [max(simulated.placement.busy(d) for d in stage.group) for stage in plan.stages]
    moves = []
    for boundary in range(1, len(plan.stages)):
        for step in (-1, 1):
            # The stage that gives a unit, and the one that takes it.
            giver, taker = (boundary - 1, boundary) if step < 0 else (boundary, boundary - 1)
            if plan.stages[giver].stop - plan.stages[giver].start > 1:
                moves.append((busy[taker] - busy[giver], boundary, step))
    for _, boundary, step in sorted(moves):
        stages = list(plan.stages)
        before, after = stages[boundary - 1], stages[boundary]
        cut = after.start + step
        stages[boundary - 1] = Stage(before.start, cut, before.group)
        stages[boundary] = Stage(cut, after.stop, after.group)
        yield Plan(tuple(stages))
