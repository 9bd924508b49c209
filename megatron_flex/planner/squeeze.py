"""Looks for a layout that fits, beside layouts that do not: descent on what a device lacks.

The searches judge memory by a bound. Where that says that nothing fits, the layouts at hand are
those that lack least by the bound, and a neighbour of one of them may fit by its program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from megatron_flex.planner.candidates import Candidate
from megatron_flex.planner.plan import Plan, Stage

Stages = tuple[Stage, ...]


def squeezed(
    fitted: Callable[[Plan], Candidate],
    starts: Sequence[Candidate],
    points: Sequence[int],
    tries: int,
) -> Candidate:
    """The first candidate that fits, or the one that lacks least.

    Args:
        fitted: a layout with the memory optimisation with which its program fits, or all there is.
        starts: candidates of ``fitted``, most promising first.
        points: units between which stages may be cut, the ends included.
        tries: layouts that are looked at from each start.
    """
    seen = {candidate.plan.stages for candidate in starts}
    nearest = min(starts, key=lambda c: c.price.shortfall)
    for best in starts:
        left, improved = tries, True
        while improved and not best.price.fits:
            improved = False
            for stages in _neighbours(best.plan.stages, points):
                if stages in seen or left == 0:
                    continue
                seen.add(stages)
                left -= 1
                candidate = fitted(Plan(stages))
                if candidate.price.fits or candidate.price.shortfall < best.price.shortfall:
                    best, improved = candidate, True
                    break
        if best.price.fits:
            return best
        nearest = min(nearest, best, key=lambda c: c.price.shortfall)
    return nearest


def _neighbours(stages: Stages, points: Sequence[int]) -> Iterator[Stages]:
    """One boundary moved by an element, or one device given to a neighbouring stage."""
    straight = sum(len(s.group) for s in stages) == len({d for s in stages for d in s.group})
    for i, (before, after) in enumerate(pairwise(stages)):
        lower = [p for p in points if before.start < p < after.start]
        upper = [p for p in points if after.start < p < after.stop]
        for cut in (*lower[-1:], *upper[:1]):
            moved = replace(before, stop=cut), replace(after, start=cut)
            yield (*stages[:i], *moved, *stages[i + 2 :])
        if not straight:
            continue
        a, b = before.group, after.group
        for left, right in ((a[:-1], (a[-1], *b)), ((*a, b[0]), b[1:])):
            if left and right:
                moved = replace(before, group=left), replace(after, group=right)
                yield (*stages[:i], *moved, *stages[i + 2 :])
