"""Look-ahead: the best sequence of plans over the next K batches, switches included.

The lengths of coming batches are known from the index, so the best sequence is a shortest path
over (iteration, candidate plan). Candidates are the exact search's plans for each batch (any number
of stages, and some fixed ones), HBSA's own sequence, the running plan and the static one. An edge
costs the switch between two plans; it uses the memory that the earlier batch leaves under the
earlier plan, and ends only in plans that the later batch fits.

Every switch is charged ``options.margin`` of an iteration besides, as an allowance for what the
model does not see; plans that are about as good as the running one are not switched to.

A window ends with the switch back to the static plan (its terminal cost). With it the rolling
sequence is never worse than the static plan: continuing as planned and then returning is always
one of the next window's paths.

Where plans are simulated, the path's first plan is one candidate among many, and what they cost
besides their iteration is said in :mod:`beyond`: no path has to lead back then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from megatron_flex.planner.beyond import Ahead, Amortised, AtFirst
from megatron_flex.planner.build import Batch
from megatron_flex.planner.candidates import MANY_DEVICES, Candidate, Finder
from megatron_flex.planner.decision import Decision, Infeasible
from megatron_flex.planner.edges import Edges
from megatron_flex.planner.hbsa import Hbsa
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.switching import Running

MAX_CANDIDATES = 32
FEW_CANDIDATES = 12
"""Where plans are known that were good for earlier batches."""
MOST_ROWS = 1 << 16
"""Of many devices HBSA's sequence is left out, and the search for plans of few stages is for the
first batch only, and for no more than so many stages times devices²: both take long."""
NOTHING = Pool.empty()
FIRST = 4
"""Simulations of a first answer, of plans that are known to be good."""
_Reached = tuple[float, float, float, tuple[Candidate, ...]]


@dataclass(frozen=True)
class Path:
    """A sequence of plans for a window of batches.

    Attributes:
        plans: the candidate of each batch, priced for it.
        iterations: seconds of all iterations.
        switches: seconds of all switches with their margins, the first one included.
        terminal: seconds of the switch back to the static plan after the window.
        rest: least seconds that any candidates take for the batches after the first.
    """

    plans: tuple[Candidate, ...]
    iterations: float
    switches: float
    terminal: float
    rest: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.iterations + self.switches + self.terminal


@dataclass(frozen=True)
class Prospect:
    """What is found before any simulation: plans for the first batch, and the best path."""

    own: tuple[Candidate, ...]
    path: Path | None


class Lookahead:
    """Plans a window of batches at a time.

    Args:
        planner: model, cluster and options (``options.lookahead`` is not read: a window is as long
            as the batches given).
        static: the plan to return to; it must fit every batch, or the guarantee against it is void.
        hbsa: its sequence is among the candidates, unless ``None``.
    """

    def __init__(self, planner: Planner, static: Plan, hbsa: Hbsa | None = None) -> None:
        self.planner = planner
        self.static = Plan(static.stages)
        self.hbsa = hbsa
        self._edges = Edges(planner, static)
        self.running_of, self.edge = self._edges.running_of, self._edges.edge

    def decide_with(
        self,
        pool: Pool,
        window: Sequence[Sequence[Batch]],
        running: Running | None,
        count: int | None = None,
    ) -> tuple[Decision, Pool]:
        """The decision for the first batch of the window, and the pool after it.

        Without simulations it is the first plan of the best path; with them what takes least time
        in its own simulation and, by the closed form, after it.

        Args:
            pool: plans that were good for earlier batches.
            window: for each coming batch, the ways of cutting it to micro-batches.
            running: the iteration before; ``None`` at the start.
            count: simulations; default what the options say.

        Raises:
            Infeasible: no plan fits the first batch. (Later batches that fit no plan end the
                window before them.)
        """
        finders = [self.planner.finder(ways) for ways in window]
        return self.decide_among(finders, running, pool, count)

    def decide_among(
        self,
        finders: Sequence[Finder],
        running: Running | None,
        pool: Pool,
        count: int | None = None,
    ) -> tuple[Decision, Pool]:
        """:meth:`decide_with`, with finders that the caller keeps from window to window."""
        return self.decide_in(self.prospect(finders, running, pool, count), finders, running, pool,
                              count)  # fmt: skip

    def prospect(
        self,
        finders: Sequence[Finder],
        running: Running | None,
        pool: Pool,
        count: int | None = None,
    ) -> Prospect:
        """What a decision begins with; arguments as :meth:`decide_with`'s."""
        count = self.planner.options.simulations if count is None else count
        own = tuple(finders[0].searched(running))
        if count == 0:
            return Prospect(own, self.best_path(finders, running, own))
        return Prospect(own, self.best_path(finders, running, own, pool, back=False))

    def first(
        self, finder: Finder, running: Running | None, pool: Pool, count: int = FIRST
    ) -> tuple[Decision, Pool] | None:
        """A decision in ``count`` simulations, and the pool after it; nothing is searched.

        It is between the static plan, the running one and those that were best of late, and does
        not look beyond the iteration. ``None`` at the start, and where none of these fits: the
        whole decision looks at others.
        """
        if running is None or not pool.records:
            return None
        asked = (self.static, running.plan)
        found = [self._as_before(finder, running, pool, plan) for plan in asked]
        if not any(c.price.fits for c in found):
            return None
        ways = len(finder.pricers)
        known = ((plan, min(way, ways - 1)) for plan, way in pool.entries)
        own = (pool.entry(c.plan, c.micro_batching, ways) for c in found)
        beyond = Amortised(self._edges, running, pool)
        try:
            decision, after = self.planner.search(
                finder, found, running, pool, count, beyond, starts=(*own, *known)
            )
        except Infeasible:  # their programs take more than the closed form says
            return None
        return decision, beyond.settled(after, decision)

    def _as_before(self, finder: Finder, running: Running, pool: Pool, plan: Plan) -> Candidate:
        """A plan with the way of cutting that was best for it of late, if it fits so."""
        ways = len(finder.pricers)
        _, way = pool.entry(plan, ways, ways + 1)
        if way < ways:
            price = finder.pricers[way].price(plan)
            if price.fits:
                return Candidate(price, way, finder.switch(running, plan))
        return finder.best_of(plan, running)

    def decide_in(
        self,
        prospect: Prospect,
        finders: Sequence[Finder],
        running: Running | None,
        pool: Pool,
        count: int | None = None,
    ) -> tuple[Decision, Pool]:
        """:meth:`decide_among`, with what :meth:`prospect` has found for the same."""
        count = self.planner.options.simulations if count is None else count
        path = prospect.path
        if path is None:  # the last word is the planner's
            return self.planner.choose(finders[0], [], running), pool
        first = path.plans[0]
        found = [first]
        if running is not None:
            found.append(finders[0].best_of(running.plan, running))
        found += prospect.own
        if count == 0:
            return self.planner.choose(finders[0], found, running, settled=first), pool
        view = AtFirst if running is None else Ahead
        ahead = view(self._edges, running, pool, finders, path.plans, path.rest)
        decision, after = self.planner.search(
            finders[0], found, running, pool, count, ahead, (self.static, Plan(first.plan.stages))
        )
        return decision, ahead.settled(after, decision)

    def best_path(
        self,
        finders: Sequence[Finder],
        running: Running | None,
        own: Sequence[Candidate] | None = None,
        pool: Pool = NOTHING,
        *,
        back: bool = True,
    ) -> Path | None:
        """The shortest path; ``None`` when nothing fits the first batch.

        Args:
            own: what the exact search found for the first batch; default: it is searched.
            pool: with plans that were good before, few others are looked at.
            back: the path ends with the switch back to the static plan.
        """
        if own is None and running is not None:
            own = list(finders[0].searched(running))
        layers = self._candidates(finders, running, own or (), pool)
        # The cheapest way to run each candidate now: all seconds, iterations, switches, plans.
        best: list[_Reached] = []
        rest = 0.0
        for number, layer in enumerate(layers):
            if not layer:
                break
            rest += min(c.price.seconds for c in layer) if number else 0.0
            if number == 0:
                best = [self._start(running, candidate) for candidate in layer]
            else:
                best = [self._extend(best, candidate) for candidate in layer]
            best.sort(key=lambda reached: (reached[0], len(reached[3][-1].plan.stages)))
        shortest: Path | None = None
        for total, iterations, switches, plans in best:
            if shortest is not None and total >= shortest.seconds:
                break  # and so are all that follow: a switch never takes less than nothing
            end = self.edge(self.running_of(plans[-1]), self.static) if back else 0.0
            path = Path(plans, iterations, switches, end, rest)
            if shortest is None or path.seconds < shortest.seconds:
                shortest = path
        return shortest

    def _start(self, running: Running | None, candidate: Candidate) -> _Reached:
        """The first batch with one candidate."""
        own = candidate.price.seconds
        change = 0.0 if running is None else self.edge(running, candidate.plan)
        return (own + change, own, change, (candidate,))

    def _extend(self, best: list[_Reached], candidate: Candidate) -> _Reached:
        """The cheapest way to run ``candidate`` after one of ``best`` (cheapest first)."""
        own = candidate.price.seconds
        stages = candidate.plan.stages
        # Staying costs nothing, so only what is cheaper than that need be priced.
        same = (r for r in best if r[3][-1].plan.stages == stages)
        found = next(((r[0], 0.0, r) for r in same), None)
        for reached in best:
            if found is not None and reached[0] >= found[0]:
                break
            edge = self.edge(self.running_of(reached[3][-1]), candidate.plan)
            if found is None or reached[0] + edge < found[0]:
                found = (reached[0] + edge, edge, reached)
        assert found is not None
        total, edge, (_, iterations, switches, plans) = found
        return (total + own, iterations + own, switches + edge, (*plans, candidate))

    def hbsa_plans(self, finders: Sequence[Finder], running: Running | None) -> list[Plan]:
        """HBSA's own sequence over the window, each decision from the plan before it."""
        assert self.hbsa is not None
        plans = []
        for finder in finders:
            try:
                decision = self.hbsa.decide(finder.pricers[0].batch, running)
            except ValueError:
                break
            plans.append(Plan(decision.plan.stages))
            running = self.running_of(finder.best_of(decision.plan, None))
        return plans

    def _candidates(
        self,
        finders: Sequence[Finder],
        running: Running | None,
        own: Sequence[Candidate],
        pool: Pool,
    ) -> list[list[Candidate]]:
        """Every candidate plan that fits, for every batch."""
        plans: list[Plan] = [self.static]
        if running is not None:
            plans.append(Plan(running.plan.stages))
        limit, devices = FEW_CANDIDATES, self.planner.units.num_devices
        some = later = [0]  # any number of stages
        if not pool.records:
            limit = MAX_CANDIDATES
            numbers = [1 << i for i in range(devices.bit_length()) if 1 << i < devices]
            many = devices > MANY_DEVICES
            some = [0, *(n for n in numbers if not many or n * devices**2 <= MOST_ROWS)]
            later = [0] if many else some
            if many:
                limit = FEW_CANDIDATES
            elif self.hbsa is not None:
                plans += self.hbsa_plans(finders, running)
            if not self.planner.options.split:
                plans += self.planner.even_plans
        found = [list(f.best_plans(later if i else some)) for i, f in enumerate(finders)]
        found[0] = [Plan(c.plan.stages) for c in own] + found[0]
        # In turn from each batch, so that a limit cuts all alike.
        for row in zip_longest(pool.layouts, *found):
            plans += [plan for plan in row if plan is not None]
        kept = list(dict.fromkeys(plans))[:limit]
        layers = []
        for finder in finders:
            priced = [finder.best_of(plan, None) for plan in kept]
            layers.append([c for c in priced if c.price.fits])
        return layers
