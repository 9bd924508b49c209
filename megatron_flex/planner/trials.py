"""Candidates of one decision, simulated: what :mod:`anytime` searches with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron_flex.planner.anytime import Entry, Trial
from megatron_flex.planner.build import ModelCosts
from megatron_flex.planner.candidates import Candidate, Finder
from megatron_flex.planner.decision import Predicted
from megatron_flex.planner.fit import MOST_DEVICES
from megatron_flex.planner.moves import Layout, neighbours
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.simulation import Placed, simulated, static_bytes
from megatron_flex.planner.switching import Running

KEPT = 8
"""Simulations of a batch that are kept for another look at it."""
MOVES_TO_A_WAY = 3
"""Of so many moves one is to another way of cutting the batch."""


class Beyond(Protocol):
    """What a plan costs besides the iteration that is decided: switches, and what comes after."""

    def least(self, plan: Plan) -> float:
        """Seconds that :meth:`of` is not below; quick. A simulation is given up by them earlier."""

    def of(self, candidate: Candidate) -> float:
        """Seconds."""

    def allows(self, candidate: Candidate, seconds: float) -> bool:
        """Whether a candidate whose iteration takes ``seconds`` may be chosen."""


@dataclass(frozen=True)
class Switching:
    """The switch from the plan that runs, with the margin that it must be worth."""

    finder: Finder
    running: Running | None
    margin: float

    def least(self, plan: Plan) -> float:
        """The same as :meth:`of`."""
        if self.running is None or plan.stages == self.running.plan.stages:
            return 0.0
        change = self.finder.switch(self.running, plan)
        return self.margin + (0.0 if change is None else change.seconds)

    def of(self, candidate: Candidate) -> float:
        """Seconds."""
        return self.least(candidate.plan)

    def allows(self, candidate: Candidate, seconds: float) -> bool:
        """Anything."""
        return True


@dataclass(frozen=True)
class Simulated:
    """A candidate with its time: the schedule's, and ``swap``, what waiting for the host adds."""

    candidate: Candidate
    seconds: float
    swap: float
    placed: Placed

    @property
    def predicted(self) -> Predicted:
        """As reported."""
        price = self.candidate.price.predicted(self.candidate.change)
        return replace(price, seconds=self.seconds, simulated=True)


class Trials:
    """Simulates entries for one decision.

    Args:
        costs: of single units.
        finder: knows the ways of cutting the batch.
        running: the iteration before.
        fitted: a candidate with what its program needs for its memory.
        runs: whether a candidate fits, and the switch to it.
        beyond: what is added to the iteration's time.
    """

    def __init__(
        self,
        costs: ModelCosts,
        finder: Finder,
        running: Running | None,
        fitted: Callable[[Candidate], Candidate],
        runs: Callable[[Candidate], bool],
        beyond: Beyond,
    ) -> None:
        self._costs = costs
        self._finder = finder
        self._running = running
        self._fitted = fitted
        self._runs = runs
        self._beyond = beyond
        #: Of every entry that was simulated to its end, seconds of its iteration.
        self.seconds: dict[Entry, float] = {}
        #: Of the others, at least so many; infinite where one does not fit.
        self.given_up: dict[Entry, float] = {}

    def __call__(
        self, entry: Entry, stop: float, *, anyway: bool = False
    ) -> Trial[Simulated] | None:
        """See :func:`megatron_flex.planner.anytime.search`.

        ``anyway``: its program is looked at even if it does not fit by the bound.
        """
        stop -= self._beyond.least(entry[0])
        self.given_up[entry] = stop
        return self._simulated(entry, stop, anyway)

    def _simulated(self, entry: Entry, stop: float, anyway: bool) -> Trial[Simulated] | None:
        plan, way = entry
        batch = self._finder.pricers[way].batch
        bare = self._costs.placed(plan)
        # The layout alone first: what is too slow is not faster with memory optimisation, unless it
        # has too little memory to have enough in flight.
        fixed = static_bytes(self._costs, bare, batch)
        room = min(self._costs.budget - fixed[d] for d in bare.devices) >= 0
        found = self._layout(entry, bare, stop, fixed) if room else None
        price = self._finder.pricers[way].price(plan)
        if not (price.fits or anyway):
            self.given_up[entry] = math.inf
            return None
        slow = found is None and room and price.fits
        if slow and (
            price.missing <= 0 or simulated(self._costs, price.plan, batch, stop=stop) is None
        ):
            return None
        change = self._finder.switch(self._running, plan)
        candidate = self._fitted(Candidate(price, way, change))
        if not self._runs(candidate):
            self.given_up[entry] = math.inf
            return None
        if found is None or candidate.plan.o_plan != bare.o_plan:
            found = simulated(self._costs, candidate.plan, batch, stop=stop)
        if found is None:
            return None
        return self._trial(entry, candidate, *found)

    def _layout(
        self, entry: Entry, bare: Plan, stop: float, fixed: Sequence[float]
    ) -> tuple[float, Placed] | None:
        """A layout alone, simulated; a first answer and the whole one ask for some alike."""
        known = self._finder.simulated
        found = known.get(entry)
        if found is None or not found[0] < stop <= found[1].stop:
            batch = self._finder.pricers[entry[1]].batch
            found = simulated(self._costs, bare, batch, stop=stop, fixed=fixed)
            if found is not None and len(known) < KEPT and self._costs.ranks <= MOST_DEVICES:
                known[entry] = found
        return found

    def _trial(
        self, entry: Entry, candidate: Candidate, seconds: float, placed: Placed
    ) -> Trial[Simulated] | None:
        swap = candidate.price.swap
        seconds += swap
        self.seconds[entry] = seconds
        del self.given_up[entry]
        if not self._beyond.allows(candidate, seconds):
            return None
        score = seconds + self._beyond.of(candidate)
        return Trial(entry, score, Simulated(candidate, seconds, swap, placed))


def moves_of(
    costs: ModelCosts, ways: int, trial: Trial[Simulated], *, straight: bool, v: bool
) -> Iterator[Entry]:
    """Entries next to one: its neighbours, and the other ways of cutting the batch, nearest first.

    Args:
        costs: of what stages are cut between.
        ways: of cutting the batch.
        straight, v: which shapes may be.
    """
    plan, way = trial.entry
    others = iter(sorted((w for w in range(ways) if w != way), key=lambda w: abs(w - way)))
    layout = Layout.of(plan, costs.points)
    if layout is not None:
        busy = trial.detail.placed.placement.busy
        work = (costs.forward + costs.backward)[1].tolist()
        near = neighbours(layout, busy, work, straight=straight, v=v, granule=costs.granule)
        for number, found in enumerate(near, 1):
            yield found.plan(costs.points), way
            if number % MOVES_TO_A_WAY == 0 and (other := next(others, None)) is not None:
                yield plan, other
    for other in others:
        yield plan, other
