"""Plans that were good for earlier batches: what a decision simulates first.

A value: the pool after a decision is a function of the pool before it and of what was simulated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_flex.planner.anytime import Entry
from megatron_flex.planner.plan import Plan, Stage

SIZE = 24
"""Entries of a pool."""
WEIGHT = 0.2
"""Of the latest batch, in the mean loss of an entry."""
USEFUL = 0.01
"""An entry that loses less than this part of a batch's time was useful to it."""
WORST = 0.5
"""The most that one batch counts for."""


@dataclass(frozen=True)
class Record:
    """What is known of an entry.

    Attributes:
        loss: mean of its time over the best one found, less 1, of late; at least that.
        useful: number of the last batch that it was useful to.
    """

    loss: float
    useful: int


@dataclass(frozen=True)
class Pool:
    """What a run remembers of its decisions.

    Attributes:
        records: of entries.
        batches: how many it has seen.
        credit: seconds that the run has taken less than on its static plan, by simulation.
        forgone: by layout, seconds that the running plan has lost to it of late.
    """

    records: Mapping[Entry, Record]
    batches: int = 0
    credit: float = 0.0
    forgone: Mapping[tuple[Stage, ...], float] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> Pool:
        """That of a new run."""
        return cls({})

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Most promising first."""
        return tuple(sorted(self.records, key=lambda e: (self.records[e].loss, _name(e))))

    @property
    def layouts(self) -> tuple[Plan, ...]:
        """Their layouts, each once."""
        return tuple(dict.fromkeys(plan for plan, _ in self.entries))

    def entry(self, plan: Plan, way: int, ways: int) -> Entry:
        """A layout with the way of cutting that was best for it of late, else with ``way``.

        ``ways``: how many there are.
        """
        layout = Plan(plan.stages)
        known = (w for other, w in self.entries if other == layout)
        return layout, min(next(known, way), ways - 1)

    def after(
        self, seconds: Mapping[Entry, float], given_up: Mapping[Entry, float] | None = None
    ) -> Pool:
        """The pool after a batch.

        Args:
            seconds: of the iteration, of every entry that was simulated to its end.
            given_up: at least so many, of the others that were tried; infinite where one does not
                fit. Nothing of them is better than was known.
        """
        best = min(seconds.values(), default=math.inf)
        if not 0.0 < best < math.inf:
            return self
        number = self.batches + 1
        records = dict(self.records)
        for entry, own in seconds.items():
            loss = min(own / best - 1.0, WORST)
            known = records.get(entry)
            if loss <= USEFUL:
                mean = loss if known is None else known.loss + WEIGHT * (loss - known.loss)
                records[entry] = Record(mean, number)
            elif known is not None:
                mean = known.loss + WEIGHT * (loss - known.loss)
                records[entry] = Record(mean, known.useful)
        for entry, least in (given_up or {}).items():
            known = records.get(entry)
            if known is not None and entry not in seconds:
                loss = max(known.loss, min(least / best - 1.0, WORST))
                mean = known.loss + WEIGHT * (loss - known.loss)
                records[entry] = Record(mean, known.useful)
        kept = sorted(records, key=lambda e: (-records[e].useful, records[e].loss, _name(e)))
        kept = kept[:SIZE]
        return replace(self, records={e: records[e] for e in kept}, batches=number)


def _name(entry: Entry) -> tuple[str, int]:
    return str(entry[0]), entry[1]
