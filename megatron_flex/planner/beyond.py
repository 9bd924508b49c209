"""What a plan costs besides the iteration that is decided, where a run goes on and on.

A switch pays over many iterations, more than a window shows. Two rules, with what the pool
remembers, take the place of knowing them:

- *Rent or buy.* What the running plan has lost to a plan of late, iteration by iteration, is set
  against the switch to that. So a plan that is better time after time is switched to once staying
  has cost as much as the switch; one that is better for one batch is not, unless that alone pays.
- *Credit.* A plan may be chosen only where the run up to then, this iteration included, is at most
  one switch from the static plan to it above the static plan's own simulated time; the running one
  also as long as it is no more above it than the switch back would cost. So the sum over a run of
  any length stays at or below that of the static plan and twice the dearer of the two. (Batches
  that the static plan does not fit are left out.)

A run's first plan has neither behind it: :class:`AtFirst`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_flex.planner.anytime import SLACK
from megatron_flex.planner.candidates import Candidate, Finder
from megatron_flex.planner.decision import Decision
from megatron_flex.planner.edges import Edges
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.simulation import simulated
from megatron_flex.planner.switching import Running

_Layout = tuple[Stage, ...]


class Amortised:
    """The switch to a plan, less what staying has lost to it of late; see the module."""

    def __init__(self, edges: Edges, running: Running | None, pool: Pool) -> None:
        self._edges = edges
        self._running = running
        self._pool = pool
        self._bar = math.inf
        self._from_static: Running | None = None
        self._there: dict[_Layout, float] = {}
        self._own: dict[_Layout, float] = {}  # least simulated seconds of an iteration

    def least(self, plan: Plan) -> float:
        """Nothing: what a plan's iteration takes is of interest even where no switch to it pays."""
        return 0.0

    def of(self, candidate: Candidate) -> float:
        """Seconds."""
        there = self._switch(candidate.plan)
        return there - min(there, self._pool.forgone.get(candidate.plan.stages, 0.0))

    def allows(self, candidate: Candidate, seconds: float) -> bool:
        """Whether the run is within its credit; the static plan itself sets the bar."""
        edges, stages = self._edges, candidate.plan.stages
        self._own[stages] = min(seconds, self._own.get(stages, math.inf))
        if stages == edges.static.stages:
            if seconds + self._pool.credit < self._bar:
                self._bar = seconds + self._pool.credit
                self._from_static = edges.running_of(candidate)
            return True
        if self._from_static is None:
            return True
        owed, running = edges.switch(self._from_static, candidate.plan), self._running
        if running is not None:
            seconds += edges.switch(running, candidate.plan)
            if stages == running.plan.stages:  # going back at once would cost as much
                owed = max(owed, edges.switch(running, edges.static))
        return seconds <= self._bar + owed

    def settled(self, pool: Pool, decision: Decision) -> Pool:
        """The pool with what the decision means for the next ones."""
        own = self._own
        seconds, static = decision.predicted.seconds, own.get(self._edges.static.stages)
        credit = self._pool.credit
        if static is not None:
            credit += static - seconds - decision.predicted.switch_seconds
        stays = self._running is not None and decision.plan.stages == self._running.plan.stages
        forgone: dict[_Layout, float] = {}
        if stays:
            before = self._pool.forgone
            for plan in pool.layouts:
                lost = before.get(plan.stages, 0.0) + seconds - own.get(plan.stages, seconds)
                if lost > 0.0:
                    forgone[plan.stages] = min(lost, self._switch(plan))
        return replace(pool, credit=credit, forgone=forgone)

    def _switch(self, plan: Plan) -> float:
        """Seconds of the switch to a plan, with its margin."""
        if self._running is None:
            return 0.0
        if plan.stages not in self._there:
            self._there[plan.stages] = self._edges.edge(self._running, plan)
        return self._there[plan.stages]


class Ahead(Amortised):
    """The same in view of the window's other batches.

    After the switch to a plan there are three ways on: it stays for the window, the next batch
    joins the best path, or the next batch is back on the static plan. These iterations are priced
    by the closed form, and count with what they take more than the least that is known of.

    Args:
        path: the window's best, a plan for each batch that any plan fits.
        rest: least seconds that are known of for the batches after the first.
    """

    def __init__(
        self,
        edges: Edges,
        running: Running | None,
        pool: Pool,
        finders: Sequence[Finder],
        path: Sequence[Candidate],
        rest: float,
    ) -> None:
        super().__init__(edges, running, pool)
        self._finders = finders
        self._path, self._rest = path, rest
        self._static = self._later(edges.static)
        self._known: dict[_Layout, float] = {}

    def of(self, candidate: Candidate) -> float:
        """Seconds."""
        stages = candidate.plan.stages
        if stages not in self._known:
            self._known[stages] = self._on(candidate)
        return super().of(candidate) + self._known[stages]

    def _later(self, plan: Plan) -> tuple[Candidate, ...]:
        """A plan for the later batches of the window, each cut as suits it best."""
        return tuple(f.best_of(plan, None) for f in self._finders[1 : len(self._path)])

    def _on(self, candidate: Candidate) -> float:
        """Of the later batches."""
        after = self._edges.running_of(candidate)
        ways = [self._static, self._path[1:]]
        if len(self._path) > 1 and candidate.plan.stages != self._edges.static.stages:
            ways.append(self._later(Plan(candidate.plan.stages)))
        return max(0.0, min(self._through(after, plans) for plans in ways) - self._rest)

    def _through(self, after: Running, plans: Sequence[Candidate]) -> float:
        """Later iterations on given plans, and their switches."""
        total = 0.0
        for candidate in plans:
            total += self._edges.edge(after, candidate.plan) + candidate.price.seconds
            if not math.isfinite(total):
                break
            after = self._edges.running_of(candidate)
        return total


class AtFirst(Ahead):
    """The same for a run's first plan, which no switch leads to: the mean of the window counts.

    From it every other plan is a switch away that often takes longer than an iteration, and the
    closed form is too rough to say which is the best to stay on. So the window's other batches are
    simulated, too. A plan that is not worth the margin does not take the place of the static one:
    what is the best of many for n batches owes some of that to chance, about as the root of n.
    """

    _seconds = 0.0  # of the iteration that is looked at
    _shortest = math.inf  # seconds of all batches, of the best
    _least = math.inf  # of what was found

    def least(self, plan: Plan) -> float:
        """The least that is known: what is slower now is not expected to be faster later on."""
        return self._least if math.isfinite(self._least) else 0.0

    def allows(self, candidate: Candidate, seconds: float) -> bool:
        """See :class:`Amortised`."""
        self._seconds = seconds
        return super().allows(candidate, seconds)

    def of(self, candidate: Candidate) -> float:
        """Seconds of the mean iteration, with the margin, more than of this one.

        What is too long to be chosen is not followed to its end.
        """
        number, before = len(self._path), self._from_static
        most = self._shortest * (1.0 + SLACK)
        later = self._stays(candidate, most - self._seconds)
        total = most if later is None else self._seconds + later
        self._shortest = min(self._shortest, total)
        if before is not None and candidate.plan.stages != self._edges.static.stages:
            total += math.sqrt(number) * self._edges.margin(before)
        found = total / number - self._seconds
        self._least = min(self._least, found)
        return found

    def _stays(self, candidate: Candidate, most: float) -> float | None:
        """On one plan, all cut alike; where it does not fit, on the path's, after a switch.

        ``None``: not below ``most``.
        """
        total, way = 0.0, candidate.micro_batching
        bare = Plan(candidate.plan.stages)
        for finder, other in zip(self._finders[1:], self._path[1:], strict=False):
            pricer = finder.pricers[min(way, len(finder.pricers) - 1)]
            price = pricer.price(bare)
            if not price.fits:
                total += self._edges.edge(self._edges.running_of(candidate), other.plan)
                pricer, price = finder.pricers[other.micro_batching], other.price
            found = simulated(finder.units, price.plan, pricer.batch, stop=most - total)
            if found is None:
                return None
            total += found[0] + price.swap
        return total
