"""The planner's front: given the coming batches and what runs now, a decision.

    planner = Planner(config, profile, cluster, PlannerOptions())
    decision = planner.decide([[batch]], running)

Everything is a value: equal input gives an equal decision, on every rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from megatron_flex.cluster.cluster import Cluster
from megatron_flex.cluster.profile import Profile
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.anytime import LEAD, Entry, Trial, search
from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.candidates import TIE, Candidate, Finder
from megatron_flex.planner.decision import Decision, Infeasible, Predicted, Reason, action_of
from megatron_flex.planner.fit import MOST_DEVICES, Fitter
from megatron_flex.planner.limits import allowance, room_for_messages
from megatron_flex.planner.maker import Maker
from megatron_flex.planner.options import AUTO, PlannerOptions
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.pricing import Price
from megatron_flex.planner.simulation import Prediction, predict
from megatron_flex.planner.squeeze import squeezed
from megatron_flex.planner.static import static_plan
from megatron_flex.planner.switching import LiveSwitches, Running
from megatron_flex.planner.tensor import check_profile
from megatron_flex.planner.trials import Beyond, Simulated, Switching, Trials, moves_of
from megatron_flex.schedule.list_scheduler import policy

DEFAULT_SIMULATIONS = 50
"""Of a decision, where nobody says how many fit into an iteration."""
FEW = 4
"""Candidates that are simulated where none is searched for."""
VERIFIED = 4
"""Programs that are made at most to see which of the best found is the best."""
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


class Planner:
    """Plans for one model on one cluster.

    Args:
        config: the model.
        profile: what its units cost on the cluster's devices.
        cluster: devices and links.
        options: what the user chose.
        devices: devices that may be used, servers next to each other; default all.
    """

    def __init__(
        self,
        config: ModelConfig,
        profile: Profile,
        cluster: Cluster,
        options: PlannerOptions,
        devices: Sequence[int] | None = None,
    ) -> None:
        profile.check_model(config)
        check_profile(profile, options.tensor)
        self._warned = False  # once is enough
        chosen = tuple(range(cluster.world_size)) if devices is None else tuple(devices)
        self.options = options
        self.elements = ModelCosts(config, profile, cluster, options, chosen)
        self.units = (
            self.elements
            if options.unit == "block"
            else ModelCosts(config, profile, cluster, replace(options, unit="block"), chosen)
        )
        self.maker = Maker(self.units)
        self.fitter = Fitter(self.maker) if options.exact_memory else None

    @cached_property
    def switches(self) -> LiveSwitches:
        """Prices of live switches."""
        return LiveSwitches(self.units)

    def finder(self, batches: Sequence[Batch]) -> Finder:
        """For candidates of one batch; warns where the profile is extrapolated."""
        if not self._warned:
            tokens = [b.tokens for b in batches]
            low, high = min(float(t.min()) for t in tokens), max(float(t.max()) for t in tokens)
            # One sample alone has tokens**2 pairs, so this is the longest it can be.
            longest = max(float(b.squares.max()) for b in batches) ** 0.5
            profile = self.units.profile
            self._warned = profile.warn_outside((int(low), int(high)), int(longest)) is not None
        return Finder(self.units, self.elements, batches, self.switches)

    def running(self, plan: Plan, batch: Batch, seconds: float | None = None) -> Running:
        """What is known of an iteration of ``plan`` on ``batch`` while it runs.

        ``seconds``: its measured time; default the predicted one.
        """
        finder = self.finder([batch])
        candidate = self.fitted(finder, finder.best_of(plan, None, "running"), plan)
        return running_of(self.units, candidate.price, seconds, float(batch.tokens.max()))

    @cached_property
    def even_plans(self) -> tuple[Plan, ...]:
        """The static plans of every even layout, cut by cost."""
        world = len(self.units.devices)
        costs = self.elements
        plans = []
        for stages in range(1, world + 1):
            if world % stages == 0 and stages <= costs.num_elements:
                for rounds, v in self.options.shapes:
                    if (2 if v else rounds) * stages > costs.num_elements:
                        continue
                    plan = static_plan(
                        costs.config, stages, world, unit=self.options.unit, rounds=rounds, v=v
                    )
                    plans.append(_on_devices(plan, self.units.devices))
        return tuple(plans)

    def best_static(self, batches: Sequence[Sequence[Batch]]) -> Plan:
        """The one plan that takes least time over all given batches and fits each of them.

        Out of every even layout and of the exact search's plan for each batch.
        """
        finders = [self.finder(ways) for ways in batches]
        plans = list(self.even_plans)
        for finder in finders:
            plans.extend(c.plan for c in finder.searched(None))
        best, best_seconds = None, math.inf
        for plan in dict.fromkeys(Plan(p.stages) for p in plans):
            total = 0.0
            for finder in finders:
                total += finder.best_of(plan, None, "static").price.seconds
                if total >= best_seconds:
                    break
            if total < best_seconds:
                best, best_seconds = plan, total
        if best is None:
            for finder in finders:
                if not any(c.price.fits for c in finder.searched(None)):
                    raise finder.infeasible()
            raise PlanError(
                "no single plan fits all batches; plan every iteration, or limit the longest sample"
            )
        return best

    def decide(
        self,
        batches: Sequence[Batch],
        running: Running | None,
        others: Sequence[tuple[Plan, str]] = (),
    ) -> Decision:
        """:meth:`decide_with` without plans of earlier batches."""
        return self.decide_with(Pool.empty(), batches, running, others)[0]

    def decide_with(
        self,
        pool: Pool,
        batches: Sequence[Batch],
        running: Running | None,
        others: Sequence[tuple[Plan, str]] = (),
        count: int | None = None,
    ) -> tuple[Decision, Pool]:
        """The best plan for the next iteration, whatever follows it, and the pool after it.

        Args:
            pool: plans that were good for the batches before it.
            batches: the ways of cutting its batch to micro-batches.
            running: the iteration before it; ``None`` at the start.
            others: further plans to consider, with where they come from.
            count: simulations; default what the options say.

        Raises:
            Infeasible: no plan fits.
        """
        finder = self.finder(batches)
        found = list(finder.searched(running))
        if running is not None:
            found += finder.searched(running, switching=False)
            found.append(finder.best_of(running.plan, running, "current"))
        if not self.options.split:
            # A fused backward runs best on equal degrees, which the closed form does not know.
            found += [finder.best_of(plan, running, "static") for plan in self.even_plans]
        found += [finder.best_of(plan, running, origin) for plan, origin in others]
        return self.search(finder, found, running, pool, count)

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
        count = self.options.simulations if count is None else count
        count = DEFAULT_SIMULATIONS if count is None else count
        fits = [c for c in found if c.price.fits]
        if count == 0 or not fits:
            decision = self.choose(finder, found, running)
            return replace(decision, simulations=min(count, 1)), pool
        current = None if running is None else running.plan
        kept = next((c for c in found if current and c.plan.stages == current.stages), None)

        def trials(beyond: Beyond) -> Trials:
            return Trials(
                self.units,
                finder,
                running,
                lambda c: self.fitted(finder, c, current),
                lambda c: self.runs(c, running),
                beyond,
            )

        stay: Trial[Simulated] | None = None
        ways = range(len(finder.pricers))
        own = None if kept is None else pool.entry(kept.plan, kept.micro_batching, len(ways))
        if own is not None and beyond is None:
            # What it is measured by comes first.
            stay = trials(Switching(finder, running, 0.0))(own, math.inf)
            margin = 0.0 if stay is None else self.options.margin * stay.score
            beyond = Switching(finder, running, margin)
        tried = trials(beyond or Switching(finder, running, 0.0))
        entries = itertools.chain(
            ((plan, way) for plan in first for way in ways),
            () if own is None else (own,),
            _in_turn(
                [(plan, min(way, ways[-1])) for plan, way in pool.entries],
                [(Plan(c.plan.stages), c.micro_batching) for c in self._promising(finder, fits)],
                self._even_entries(finder, running),
            ),
        )
        result = search(
            lambda entry, stop: stay if stay and entry == own else tried(entry, stop),
            starts or entries,
            partial(
                moves_of,
                self.elements,
                len(ways),
                straight=self.options.straight,
                v=self.options.v,
            ),
            count,
        )
        if not result.trials:
            decision = self.choose(finder, found, running)
            return replace(decision, simulations=result.simulations), pool
        best, prediction = self._verified(finder, result.trials)
        mine = next(
            (t for t in result.trials if current and t.entry[0].stages == current.stages), None
        )
        kept = None if kept is None else self.fitted(finder, kept, current)
        second = next((t for t in result.trials if t.entry[0].stages != best.entry[0].stages), None)
        decision = self._decision(
            finder,
            running,
            Judged(best.detail.candidate, prediction),
            kept if mine is None else mine.detail.candidate,
            None if mine is None else mine.detail.predicted,
            None if second is None else (second.entry[0], second.detail.predicted),
        )
        if stay is not None and own is not None:
            tried.seconds[own] = stay.detail.seconds
        after = pool.after(tried.seconds, tried.given_up)
        return replace(decision, simulations=result.simulations), after

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
        ranked = sorted(_distinct(found), key=lambda c: _rank(c, current, c.seconds))
        ranked = [c for c in ranked if c.price.fits] or self._by_program(finder, ranked, running)
        few = self._fitting(finder, ranked, 1 if self.options.simulations == 0 else FEW, running)
        kept = None if kept is None else self.fitted(finder, kept, current)
        if settled is not None:
            settled = self.fitted(finder, settled, current)
            few = [c for c in few if c.plan.stages != settled.plan.stages][:2]
            few = [settled, *few] if self.runs(settled, running) else few
        if kept is not None and kept.price.fits and kept not in few:
            few.append(kept)
        if not few:
            few = self._by_program(finder, ranked, running)
        if settled not in few:
            settled = None
        judged = self._judge_all(finder, few, settled)
        judged.sort(key=lambda j: _rank(j.candidate, current, j.predicted.total))
        best = judged[0]
        mine = next((j for j in judged if kept is not None and j.candidate == kept), None)
        if settled is not None:
            best = next(j for j in judged if j.candidate is settled)
        elif mine is not None and best is not mine:
            saved = mine.predicted.total - best.predicted.total
            if saved < self.options.margin * mine.predicted.total:
                best = mine
        second = next(
            (j for j in judged if j.candidate.plan.stages != best.candidate.plan.stages), None
        )
        return self._decision(
            finder,
            running,
            best,
            kept,
            None if mine is None else mine.predicted,
            None if second is None else (second.candidate.plan, second.predicted),
        )

    def _decision(
        self,
        finder: Finder,
        running: Running | None,
        best: Judged,
        kept: Candidate | None,
        mine: Predicted | None,
        second: tuple[Plan, Predicted] | None,
    ) -> Decision:
        """For ``best``; ``kept`` is the current plan, ``mine`` its prediction if it fits."""
        current = None if running is None else running.plan
        stays = current is not None and best.candidate.plan.stages == current.stages
        # Conditions compare the current plan with the best other one.
        target: Predicted | None = best.predicted
        if stays:
            mine, target = best.predicted, None if second is None else second[1]
        cut = finder.pricers[best.candidate.micro_batching].batch.target
        plan = replace(best.candidate.plan, cut=cut)
        if best.simulated is not None:
            plan = self._named(plan, best.simulated)
        return Decision(
            plan=plan,
            action=action_of(current, best.candidate.plan),
            micro_batching=best.candidate.micro_batching,
            predicted=best.predicted,
            reasons=conditions(self.units, kept, mine, target, self.options.margin),
            current=mine,
            runner_up=second,
            budget=self.units.budget,
            planner=self.options.planner,
        )

    def _promising(self, finder: Finder, fits: Sequence[Candidate]) -> list[Candidate]:
        """Candidates in the order in which they are worth a simulation."""
        found = sorted(_distinct(fits), key=lambda c: _rank(c, None, c.seconds))
        if self.options.split:
            return found

        def nearer(c: Candidate) -> float:
            return finder.pricers[c.micro_batching].refined(c.price) + c.switch_seconds

        some = LEAD  # a nearer estimate takes time
        return sorted(found[:some], key=nearer) + found[some:]

    def _even_entries(self, finder: Finder, running: Running | None) -> Iterator[Entry]:
        """Even plans, each cut as suits it best by the closed form, then finest, then otherwise.

        Priced when it comes to it.
        """
        found = [finder.best_of(plan, running, "static") for plan in self.even_plans]
        found.sort(key=lambda c: _rank(c, None, c.seconds))
        for c in found:
            yield Plan(c.plan.stages), c.micro_batching
        for way in reversed(range(len(finder.pricers))):
            for c in found:
                yield Plan(c.plan.stages), way

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
            if self.fitter is None or len(self.units.devices) > MOST_DEVICES:
                return trial, predict(self.units, found.candidate.plan, batch)
            made = self.maker.keep(found.candidate.plan, batch).prediction
            score = trial.score + made.seconds + found.swap - found.seconds
            if best is None or score < best[0]:
                best = score, trial, made
        assert best is not None
        return best[1:]

    def named(self, plan: Plan, batch: Batch) -> Plan:
        """The plan with the schedule that it will run under."""
        return self._named(plan, self.maker.keep(plan, batch).prediction)

    def _named(self, plan: Plan, prediction: Prediction) -> Plan:
        if self.options.schedule != AUTO:
            return plan
        spare = prediction.spare if policy(prediction.schedule).split else 0
        return replace(plan, schedule=prediction.schedule, spare=spare)

    def fitted(
        self, finder: Finder, candidate: Candidate, running: Plan | None = None
    ) -> Candidate:
        """The candidate with what its program needs for its memory; ``running``: before it."""
        if self.fitter is None:
            return candidate
        pricer = finder.pricers[candidate.micro_batching]
        return replace(candidate, price=self.fitter.fit(pricer, candidate.price, running))

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
            fitted = self.fitted(finder, candidate, before)
            if self.runs(fitted, running):
                found.append(fitted)
            if len(found) == number:
                break
        return found

    def runs(self, candidate: Candidate, running: Running | None) -> bool:
        """Whether a candidate fits, and so does the switch to it."""
        if not candidate.price.fits:
            return False
        if running is None or self.fitter is None:
            return True
        return self.fitter.hands_over(running, candidate.plan)

    def _by_program(
        self, finder: Finder, found: Sequence[Candidate], running: Running | None
    ) -> list[Candidate]:
        """A plan that fits by its program though not by the bound.

        Raises :class:`Infeasible` when there is none among those that lack least.
        """
        if self.fitter is None:
            raise finder.infeasible()
        plans = [*found, *(finder.best_of(p, running, "static") for p in self.even_plans)]
        plans = sorted(_distinct(plans), key=lambda c: (c.price.shortfall, _rank(c, None, 0.0)))
        fitted = [self.fitted(finder, c) for c in plans[:LAST_TRIES]]
        fits = [c for c in fitted if c.price.fits]
        if not fits:
            fitted.sort(key=lambda c: c.price.shortfall)
            nearest = squeezed(
                lambda plan: self.fitted(finder, finder.best_of(plan, running, "squeezed")),
                fitted[:STARTS],
                self.elements.points,
                NEIGHBOURS,
            )
            fitted.append(nearest)
            fits = [nearest] if nearest.price.fits else []
        # What is on the host takes less room when it comes.
        pricers = finder.pricers
        small = (
            replace(c, price=self.fitter.smallest(pricers[c.micro_batching], c.plan)) for c in fits
        )
        for candidate in itertools.chain(fits, small):
            if self.runs(candidate, running):
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
            beaten = seconds * (1.0 - self.options.margin) >= best
            if beaten and candidate is not settled:
                judged.append(Judged(candidate, None))
                continue
            judged.append(self._judge(finder, candidate))
            best = min(best, judged[-1].predicted.total)
        return judged

    def _judge(self, finder: Finder, candidate: Candidate) -> Judged:
        if self.options.simulations == 0:
            return Judged(candidate, None)
        pricer = finder.pricers[candidate.micro_batching]
        if self.fitter is not None and len(self.units.devices) <= MOST_DEVICES:
            made = self.maker.keep(candidate.plan, pricer.batch)
            return Judged(candidate, made.prediction)
        return Judged(candidate, pricer.simulate(candidate.price))


def running_of(
    costs: ModelCosts, price: Price, seconds: float | None = None, largest: float = 0.0
) -> Running:
    """An iteration as the next switch sees it; ``largest``: tokens of its largest micro-batch."""
    budget = float(costs.budget)
    if costs.options.exact_memory:
        room = room_for_messages(
            costs.config, len(price.plan.stages), largest, costs.options.tensor
        )
        budget = allowance(budget, room)
    spare = tuple(max(0.0, budget - size) for size in price.device_bytes)
    return Running(price.plan, price.seconds if seconds is None else seconds, spare)


def conditions(
    costs: ModelCosts,
    kept: Candidate | None,
    mine: Predicted | None,
    other: Predicted | None,
    margin: float,
) -> tuple[Reason, ...]:
    """Conditions A to D of the paper, device by device instead of in total.

    ``kept`` is the current plan (``mine``: judged, when it fits), ``other`` the plan that it is
    compared with, if there is one. Without a current plan there is nothing to compare.
    """
    if kept is None:
        return ()
    price, budget = kept.price, costs.budget
    needed = budget + price.missing if price.missing > 0 else max(price.device_bytes)
    a = price.missing <= 0
    reasons = [
        Reason("A", "the batch fits the current plan: bytes of its fullest device <= budget",
               needed, budget, "bytes", a),
    ]  # fmt: skip
    if not a:
        after = budget + price.shortfall if price.shortfall > 0 else max(price.device_bytes)
        reasons.append(
            Reason("C", "memory optimisation makes it fit: bytes after it <= budget",
                   after, budget, "bytes", price.fits)
        )  # fmt: skip
    if mine is not None and other is not None:
        switched, stayed = other.total, mine.total
        text = "switching does not pay: other plan and switch >= current plan"
        if a:
            reasons.append(Reason("B", text, switched, stayed, "seconds", switched >= stayed))
        else:
            text += " with recompute and swap"
            reasons.append(Reason("D", text, switched, stayed, "seconds", switched >= stayed))
        bar = (1.0 - margin) * stayed
        reasons.append(
            Reason("margin", f"a switch saves at least {margin:.1%}: other plan and switch <= bar",
                   switched, bar, "seconds", switched <= bar)
        )  # fmt: skip
    return tuple(reasons)


def _rank(
    candidate: Candidate, current: Plan | None, seconds: float
) -> tuple[float, bool, float, int, str]:
    """Ties in this order: cost (1e-6 relative), keep, fewest bytes moved, fewest stages, text."""
    rounded = math.inf
    if math.isfinite(seconds) and seconds > 0:
        rounded = round(math.log(seconds) / TIE)
    away = current is None or candidate.plan.stages != current.stages
    return rounded, away, candidate.moved, len(candidate.plan.stages), str(candidate.plan)


def _in_turn(*rows: Iterable[Entry]) -> Iterator[Entry]:
    """One of each row in turn, until all are at their end."""
    for some in itertools.zip_longest(*rows):
        yield from (entry for entry in some if entry is not None)


def _distinct(found: Sequence[Candidate]) -> list[Candidate]:
    """One candidate for each layout and micro-batching."""
    return list({(c.plan.stages, c.micro_batching): c for c in reversed(found)}.values())


def _on_devices(plan: Plan, devices: Sequence[int]) -> Plan:
    """The plan with its devices numbered by slot."""
    return Plan(
        tuple(replace(s, group=tuple(devices[d] for d in s.group)) for s in plan.stages),
        plan.o_plan,
    )


__all__ = ["Infeasible", "Planner", "running_of"]
