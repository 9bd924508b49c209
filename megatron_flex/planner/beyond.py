"""What a plan costs besides the iteration that is decided, where a run goes on and on.

A switch pays over many iterations, more than a window shows. Two rules, with what the pool
remembers, take the place of knowing them:

- *Rent or buy.* What the running plan has lost to a plan of late, iteration by iteration, is set
  against the switch to that. So a plan that is better time after time is switched to once staying
  has cost as much as the switch; one that is better for one batch is not, unless that alone pays.
- *Credit.* A plan may be chosen only where the run up to then, this iteration included, is at most
  one switch from the static plan to it above the static plan's own simulated time. So the sum over
  a run of any length stays at or below that of the static plan and one switch. (Batches that the
  static plan does not fit are left out.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_flex.planner.candidates import Candidate, Finder
from megatron_flex.planner.decision import Decision
from megatron_flex.planner.edges import Edges
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.planner.pool import Pool
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
        bar = self._bar + edges.edge(self._from_static, candidate.plan)
        return seconds + self._switch(candidate.plan) <= bar

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
        return tuple(f.best_of(plan, None, "window") for f in self._finders[1 : len(self._path)])

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
