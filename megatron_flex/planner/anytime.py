"""An anytime search: first what is likely good, then moves from the best found, until a count.

What it has found after n simulations does not depend on how many follow, so more are never worse,
and a decision is repeated exactly with the count that it took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron_flex.planner.plan import Plan

LEAD = 12
"""Starts that are tried before any move."""
TURN = 4
"""Of so many simulations one is for another start, once moves are tried."""
SLACK = 0.02
"""Moves from others than the best are followed to the end if they lose no more than this."""

Entry = tuple[Plan, int]
"""A layout, and the number of a way of cutting the batch."""
T = TypeVar("T")


@dataclass(frozen=True)
class Trial(Generic[T]):
    """An entry that was simulated to the end; ``score``: seconds, the less the better."""

    entry: Entry
    score: float
    detail: T

    @property
    def rank(self) -> tuple[float, str, int]:
        """By score; ties by name."""
        return self.score, str(self.entry[0]), self.entry[1]


@dataclass(frozen=True)
class Found(Generic[T]):
    """What a search found.

    Attributes:
        trials: best first.
        scores: of every entry tried; of those given up, the score at which they were.
        simulations: how many.
    """

    trials: tuple[Trial[T], ...]
    scores: Mapping[Entry, float]
    simulations: int


def search(
    evaluate: Callable[[Entry, float], Trial[T] | None],
    starts: Iterable[Entry],
    moves: Callable[[Trial[T]], Iterable[Entry]],
    count: int,
) -> Found[T]:
    """Try entries by simulation, at most ``count`` of them.

    Args:
        evaluate: ``evaluate(entry, stop)`` simulates; ``None`` if the score is not below ``stop``,
            or where it may not be chosen.
        starts: in the order in which they are tried.
        moves: entries next to one.
    """
    return _Search(evaluate, moves, count).run(iter(starts))


class _Search(Generic[T]):
    def __init__(
        self,
        evaluate: Callable[[Entry, float], Trial[T] | None],
        moves: Callable[[Trial[T]], Iterable[Entry]],
        count: int,
    ) -> None:
        self._evaluate = evaluate
        self._moves = moves
        self._left = count
        self._count = 0
        self._scores: dict[Entry, float] = {}
        self._trials: dict[Entry, Trial[T]] = {}
        self._followed: set[Entry] = set()
        self._best: Trial[T] | None = None
        self._slack = 0.0
        self._moving = self._following()

    def run(self, starts: Iterator[Entry]) -> Found[T]:
        while self._left and (self._count < LEAD or self._best is None):
            entry = next(starts, None)
            if entry is None:
                break
            self._try(entry)
        while self._left:
            if self._count % TURN:
                entry = self._move() or next(starts, None)
            else:
                entry = next(starts, None) or self._move()
            if entry is None:
                break
            self._try(entry)
        trials = tuple(sorted(self._trials.values(), key=lambda t: t.rank))
        return Found(trials, self._scores, self._count)

    def _try(self, entry: Entry) -> None:
        if entry in self._scores:
            return
        self._left -= 1
        self._count += 1
        best = math.inf if self._best is None else self._best.score
        stop = best * (1.0 + self._slack)
        trial = self._evaluate(entry, stop)
        self._scores[entry] = stop if trial is None else trial.score
        if trial is not None:
            self._trials[entry] = trial
            if self._best is None or trial.rank < self._best.rank:
                self._best = trial

    def _move(self) -> Entry | None:
        entry = next(self._moving, None)
        if entry is None:  # another start may have opened more
            self._moving = self._following()
            entry = next(self._moving, None)
        return entry

    def _following(self) -> Iterator[Entry]:
        """Moves from the best, and when there are none left, from the next."""
        while True:
            others = [t for e, t in self._trials.items() if e not in self._followed]
            if not others:
                return
            trial = min(others, key=lambda t: t.rank)
            best = self._best
            self._slack = 0.0 if trial is best else SLACK
            self._followed.add(trial.entry)
            for entry in self._moves(trial):
                if entry in self._scores:
                    continue
                yield entry
                if self._best is not best:
                    # What is better goes first; what is left here may be worth it later.
                    self._followed.discard(trial.entry)
                    break
