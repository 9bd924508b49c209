"""The choice between a few candidates, by the closed form or by their simulation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_flex.planner.candidates import Candidate, Finder, distinct, rank
from megatron_flex.planner.conditions import conditions
from megatron_flex.planner.decision import Decision, Predicted, action_of
from megatron_flex.planner.fit import MOST_DEVICES
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.simulation import Prediction
from megatron_flex.planner.squeeze import squeezed
from megatron_flex.planner.switching import Running
from megatron_flex.planner.workbench import Workbench

FEW = 4
"""Candidates that are simulated where none is searched for."""
LAST_TRIES = 8
"""Plans that are looked at exactly where the bound says that none fits."""
NEIGHBOURS = 40
"""Layouts that are looked at beside each of the nearest :data:`STARTS` plans where none of them
fits: without one training ends."""
STARTS = 3


@dataclass(frozen=True)
class Judged:
    """A candidate with what decides: its simulated (or closed-form) time and switch."""

    candidate: Candidate
    simulated: Prediction | None

    @property
    def predicted(self) -> Predicted:
        """As reported."""
        return self.candidate.price.predicted(self.candidate.change, self.simulated)


class Chooser:
    """Decides between candidates of one batch."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench

    def choose(
        self,
        finder: Finder,
        found: Sequence[Candidate],
        running: Running | None,
        settled: Candidate | None = None,
    ) -> Decision:
        """Decide between a few candidates, by the closed form or by their simulation.

        ``settled``: it has been chosen for what comes after, and is only compared.
        """
        current = None if running is None else running.plan
        kept = next((c for c in found if current and c.plan.stages == current.stages), None)
        ranked = sorted(distinct(found), key=lambda c: rank(c, current, c.seconds))
        ranked = [c for c in ranked if c.price.fits] or self._by_program(finder, ranked, running)
        number = 1 if self._bench.options.simulations == 0 else FEW
        few = self._fitting(finder, ranked, number, running)
        kept = None if kept is None else self._bench.fitted(finder, kept, current)
        if settled is not None:
            settled = self._bench.fitted(finder, settled, current)
            few = [c for c in few if c.plan.stages != settled.plan.stages][:2]
            few = [settled, *few] if self._bench.runs(settled, running) else few
        if kept is not None and kept.price.fits and kept not in few:
            few.append(kept)
        if not few:
            few = self._by_program(finder, ranked, running)
        if settled not in few:
            settled = None
        judged = self._judge_all(finder, few, settled)
        judged.sort(key=lambda j: rank(j.candidate, current, j.predicted.total))
        best = judged[0]
        mine = next((j for j in judged if kept is not None and j.candidate == kept), None)
        if settled is not None:
            best = next(j for j in judged if j.candidate is settled)
        elif mine is not None and best is not mine:
            saved = mine.predicted.total - best.predicted.total
            if saved < self._bench.options.margin * mine.predicted.total:
                best = mine
        second = next(
            (j for j in judged if j.candidate.plan.stages != best.candidate.plan.stages), None
        )
        return self.decision(
            finder,
            running,
            best,
            kept,
            None if mine is None else mine.predicted,
            None if second is None else (second.candidate.plan, second.predicted),
        )

    def decision(
        self,
        finder: Finder,
        running: Running | None,
        best: Judged,
        kept: Candidate | None,
        mine: Predicted | None,
        second: tuple[Plan, Predicted] | None,
        bound: float = 0.0,
    ) -> Decision:
        """For ``best``; ``kept`` is the current plan, ``mine`` its prediction if it fits.

        ``bound``: seconds that an iteration on ``kept`` takes at least, where its simulation was
        given up; for the reasons of a switch.
        """
        current = None if running is None else running.plan
        stays = current is not None and best.candidate.plan.stages == current.stages
        # Conditions compare the current plan with the best other one.
        target: Predicted | None = best.predicted
        if stays:
            mine, target = best.predicted, None if second is None else second[1]
        compared = mine
        if mine is None and kept is not None and kept.price.fits:
            below = kept.price.predicted(kept.change)
            compared = replace(below, seconds=max(bound, below.seconds))
        batch = finder.pricers[best.candidate.micro_batching].batch
        plan = self._bench.decided(best.candidate.plan, batch, best.simulated)
        return Decision(
            plan=plan,
            action=action_of(current, best.candidate.plan),
            micro_batching=best.candidate.micro_batching,
            predicted=best.predicted,
            reasons=conditions(
                self._bench.units,
                kept,
                compared,
                target,
                self._bench.options.margin,
                at_least=compared is not mine,
            ),
            current=mine,
            runner_up=second,
            budget=self._bench.units.budget,
            planner=self._bench.options.planner,
        )

    def _fitting(
        self,
        finder: Finder,
        ranked: Sequence[Candidate],
        number: int,
        running: Running | None,
    ) -> list[Candidate]:
        """The first ``number`` candidates that fit."""
        found: list[Candidate] = []
        for candidate in ranked:
            before = None if running is None else running.plan
            fitted = self._bench.fitted(finder, candidate, before)
            if self._bench.runs(fitted, running):
                found.append(fitted)
            if len(found) == number:
                break
        return found

    def _by_program(
        self, finder: Finder, found: Sequence[Candidate], running: Running | None
    ) -> list[Candidate]:
        """A plan that fits by its program though not by the bound.

        Raises :class:`Infeasible` when there is none among those that lack least.
        """
        if self._bench.fitter is None:
            raise finder.infeasible()
        plans = [*found, *(finder.best_of(p, running) for p in self._bench.even_plans)]
        plans = sorted(distinct(plans), key=lambda c: (c.price.shortfall, rank(c, None, 0.0)))
        fitted = [self._bench.fitted(finder, c) for c in plans[:LAST_TRIES]]
        fits = [c for c in fitted if c.price.fits]
        if not fits:
            fitted.sort(key=lambda c: c.price.shortfall)
            nearest = squeezed(
                lambda plan: self._bench.fitted(finder, finder.best_of(plan, running)),
                fitted[:STARTS],
                self._bench.elements.points,
                NEIGHBOURS,
            )
            fitted.append(nearest)
            fits = [nearest] if nearest.price.fits else []
        # What is on the host takes less room when it comes.
        smallest, pricers = self._bench.fitter.smallest, finder.pricers
        small = (replace(c, price=smallest(pricers[c.micro_batching], c.plan)) for c in fits)
        for candidate in itertools.chain(fits, small):
            if self._bench.runs(candidate, running):
                return [candidate]
        if fits:  # over the margin in the switch: without it training ends
            return fits[:1]
        best = min(fitted, key=lambda c: c.price.shortfall).price
        raise finder.infeasible(best)

    def _judge_all(
        self, finder: Finder, few: Sequence[Candidate], settled: Candidate | None
    ) -> list[Judged]:
        """Simulate candidates, most promising first.

        What the estimates put above a simulated one by more than the margin is not simulated: the
        closed form is at or below the simulation, except on uneven degrees, where the nearer
        estimate is.
        """
        judged: list[Judged] = []
        best = math.inf

        def least(candidate: Candidate) -> float:
            pricer = finder.pricers[candidate.micro_batching]
            nearer = pricer.refined(candidate.price) + candidate.switch_seconds
            return min(candidate.seconds, nearer)

        for seconds, candidate in sorted(((least(c), c) for c in few), key=lambda pair: pair[0]):
            beaten = seconds * (1.0 - self._bench.options.margin) >= best
            if beaten and candidate is not settled:
                judged.append(Judged(candidate, None))
                continue
            judged.append(self._judge(finder, candidate))
            best = min(best, judged[-1].predicted.total)
        return judged

    def _judge(self, finder: Finder, candidate: Candidate) -> Judged:
        if self._bench.options.simulations == 0:
            return Judged(candidate, None)
        pricer = finder.pricers[candidate.micro_batching]
        if self._bench.fitter is not None and self._bench.units.ranks <= MOST_DEVICES:
            made = self._bench.maker.keep(candidate.plan, pricer.batch)
            return Judged(candidate, made.prediction)
        return Judged(candidate, pricer.simulate(candidate.price))
