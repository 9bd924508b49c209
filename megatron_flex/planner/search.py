"""The search by simulation behind a decision: what is known to be good first, then moves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from megatron_flex.planner.anytime import LEAD, Entry, Trial, search
from megatron_flex.planner.candidates import MANY_DEVICES, Candidate, Finder, distinct, rank
from megatron_flex.planner.choose import Chooser, Judged
from megatron_flex.planner.decision import Decision
from megatron_flex.planner.fit import MOST_DEVICES
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.simulation import Prediction
from megatron_flex.planner.switching import Running
from megatron_flex.planner.trials import Beyond, Simulated, Switching, Trials, moves_of
from megatron_flex.planner.workbench import Workbench

DEFAULT_SIMULATIONS = 50
"""Of a decision, where nobody says how many fit into an iteration."""
NEAR = 4
"""Plans that are looked at where memory is short, of those that do not fit by the bound."""
VERIFIED = 4
"""Programs that are made at most to see which of the best found is the best."""


class Searcher:
    """Decides by simulation."""

    def __init__(self, bench: Workbench, chooser: Chooser) -> None:
        self._bench = bench
        self._chooser = chooser

    def search(
        self,
        finder: Finder,
        found: Sequence[Candidate],
        running: Running | None,
        pool: Pool,
        count: int | None = None,
        beyond: Beyond | None = None,
        first: Sequence[Plan] = (),
        starts: Sequence[Entry] = (),
    ) -> tuple[Decision, Pool]:
        """The best plan that a search by simulation finds, and the pool after it.

        The pool's plans are tried first, then ``found``, the best of them first, and moves from
        what is best so far (:mod:`anytime`).

        Args:
            count: simulations; default what the options say.
            beyond: what a plan costs besides its iteration; default the switch to it.
            first: plans that are tried before all others, cut in every way.
            starts: with them nothing else is tried but moves from them.
        """
        count = self._bench.options.simulations if count is None else count
        count = DEFAULT_SIMULATIONS if count is None else count
        fits = [c for c in found if c.price.fits]
        if count == 0 or not fits:
            decision = self._chooser.choose(finder, found, running)
            return replace(decision, simulations=min(count, 1)), pool
        current = None if running is None else running.plan
        kept = next((c for c in found if current and c.plan.stages == current.stages), None)

        def trials(beyond: Beyond) -> Trials:
            return Trials(
                self._bench.units,
                finder,
                running,
                lambda c: self._bench.fitted(finder, c, current),
                lambda c: self._bench.runs(c, running),
                beyond,
            )

        stay: Trial[Simulated] | None = None
        ways = range(len(finder.pricers))
        own = None if kept is None else pool.entry(kept.plan, kept.micro_batching, len(ways))
        if own is not None and beyond is None:
            # What it is measured by comes first.
            stay = trials(Switching(finder, running, 0.0))(own, math.inf)
            margin = 0.0 if stay is None else self._bench.options.margin * stay.score
            beyond = Switching(finder, running, margin)
        tried = trials(beyond or Switching(finder, running, 0.0))

        def entries() -> Iterator[Entry]:
            yield from self._cut(finder, first)
            if own is not None:
                yield own
            yield from _in_turn(
                [(plan, min(way, ways[-1])) for plan, way in pool.entries],
                [(Plan(c.plan.stages), c.micro_batching) for c in self._promising(finder, fits)],
                self._even_entries(finder, running),
            )

        result = search(
            lambda entry, stop: stay if stay and entry == own else tried(entry, stop),
            starts or entries(),
            partial(
                moves_of,
                self._bench.elements,
                len(ways),
                straight=self._bench.options.straight,
                v=self._bench.options.v,
            ),
            count,
        )
        if not result.trials:
            decision = self._chooser.choose(finder, found, running)
            return replace(decision, simulations=result.simulations), pool
        ranked = list(result.trials)
        saves = ranked[0].detail.candidate.plan.o_plan.saves
        if saves and self._bench.fitter is not None and self._bench.units.ranks <= MOST_DEVICES:
            # Memory is short: what fits by its program though not by the bound may be faster.
            even = (finder.best_of(p, running) for p in self._bench.even_plans)
            near = distinct([*found, *even])
            near.sort(key=lambda c: (c.price.shortfall, rank(c, None, 0.0)))
            for c in [c for c in near if not c.price.fits][:NEAR]:
                trial = tried((Plan(c.plan.stages), c.micro_batching), ranked[0].score, anyway=True)
                if trial is not None:
                    ranked = sorted([*ranked, trial], key=lambda t: t.rank)
        best, prediction = self._verified(finder, ranked)
        mine = next((t for t in ranked if current and t.entry[0].stages == current.stages), None)
        kept = None if kept is None else self._bench.fitted(finder, kept, current)
        second = next((t for t in ranked if t.entry[0].stages != best.entry[0].stages), None)
        decision = self._chooser.decision(
            finder,
            running,
            Judged(best.detail.candidate, prediction),
            kept if mine is None else mine.detail.candidate,
            None if mine is None else mine.detail.predicted,
            None if second is None else (second.entry[0], second.detail.predicted),
            0.0 if own is None else tried.given_up.get(own, 0.0),
        )
        if stay is not None and own is not None:
            tried.seconds[own] = stay.detail.seconds
        after = pool.after(tried.seconds, tried.given_up)
        return replace(decision, simulations=result.simulations), after

    def _cut(self, finder: Finder, plans: Sequence[Plan]) -> Iterator[Entry]:
        """Plans cut in every way; on many devices, where there are few trials, as suits first."""
        ways = range(len(finder.pricers))
        if self._bench.units.num_devices <= MANY_DEVICES:
            yield from ((plan, way) for plan in plans for way in ways)
            return

        def nearest(plan: Plan) -> list[Entry]:
            bounds = [finder.pricers[way].bound(plan) for way in ways]
            return [(plan, way) for way in sorted(ways, key=bounds.__getitem__)]

        yield from _in_turn(*map(nearest, plans))

    def _promising(self, finder: Finder, fits: Sequence[Candidate]) -> list[Candidate]:
        """Candidates in the order in which they are worth a simulation."""
        found = sorted(distinct(fits), key=lambda c: rank(c, None, c.seconds))
        if self._bench.options.split:
            return found

        def nearer(c: Candidate) -> float:
            return finder.pricers[c.micro_batching].refined(c.price) + c.switch_seconds

        some = LEAD  # a nearer estimate takes time
        return sorted(found[:some], key=nearer) + found[some:]

    def _even_entries(self, finder: Finder, running: Running | None) -> Iterator[Entry]:
        """Even plans, each cut as suits it best by the closed form, then finest, then otherwise.

        Priced when it comes to it.
        """
        if self._bench.units.num_devices > MANY_DEVICES:
            ways = range(len(finder.pricers))
            bounds = [
                (*min((finder.pricers[way].bound(plan), way) for way in ways), plan)
                for plan in self._bench.even_plans
            ]
            bounds.sort(key=lambda b: b[:2])
            found = [(Plan(plan.stages), way) for _, way, plan in bounds]
        else:
            some = [finder.best_of(plan, running) for plan in self._bench.even_plans]
            some.sort(key=lambda c: rank(c, None, c.seconds))
            found = [(Plan(c.plan.stages), c.micro_batching) for c in some]
        yield from found
        for way in reversed(range(len(finder.pricers))):
            yield from ((plan, way) for plan, _ in found)

    def _verified(
        self, finder: Finder, ranked: Sequence[Trial[Simulated]]
    ) -> tuple[Trial[Simulated], Prediction | None]:
        """The best trial, judged by the program that will run, and its prediction.

        A program may have to leave more memory free than a placement, and so take longer.
        """
        best: tuple[float, Trial[Simulated], Prediction | None] | None = None
        for trial in ranked[:VERIFIED]:
            if best is not None and best[0] <= trial.score:
                break
            found = trial.detail
            batch = finder.pricers[found.candidate.micro_batching].batch
            if self._bench.fitter is None or self._bench.units.ranks > MOST_DEVICES:
                return trial, self._bench.predicted(found.candidate.plan, batch, found.placed)
            made = self._bench.maker.keep(found.candidate.plan, batch).prediction
            score = trial.score + made.seconds + found.swap - found.seconds
            if best is None or score < best[0]:
                best = score, trial, made
        assert best is not None
        return best[1:]


def _in_turn(*rows: Iterable[Entry]) -> Iterator[Entry]:
    """One of each row in turn, until all are at their end."""
    for some in itertools.zip_longest(*rows):
        yield from (entry for entry in some if entry is not None)
