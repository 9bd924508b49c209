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

Where plans are simulated, the path's first plan is one candidate among many, and what they cost is
:class:`Ahead`'s: of the rolling sequence the same holds then in simulated time, for windows of any
length, one batch included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from megatron_flex.planner.anytime import Entry
from megatron_flex.planner.build import Batch
from megatron_flex.planner.candidates import Candidate, Finder
from megatron_flex.planner.decision import Decision
from megatron_flex.planner.hbsa import Hbsa
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.planner.planner import Planner, running_of
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.switching import Running

MAX_CANDIDATES = 32
FEW_CANDIDATES = 12
"""Where plans are known that were good for earlier batches."""
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
        self._switches = planner.switches

    def decide(self, window: Sequence[Sequence[Batch]], running: Running | None) -> Decision:
        """:meth:`decide_with` without plans of earlier batches."""
        return self.decide_with(Pool.empty(), window, running)[0]

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
        known = pool if count != 0 else NOTHING
        return Prospect(own, self.best_path(finders, running, own, known))

    def first(
        self, finder: Finder, running: Running | None, pool: Pool, count: int = FIRST
    ) -> tuple[Decision, Pool] | None:
        """A decision in ``count`` simulations, and the pool after it; nothing is searched.

        It is between the static plan, the running one and those that were best of late, and looks
        no further than the iteration, the switch to it and that back to the static plan. ``None``
        at the start, and where static and running plan do not fit.
        """
        if running is None or not pool.records:
            return None
        static = finder.best_of(self.static, running, "static")
        found = [static, finder.best_of(running.plan, running, "current")]
        if not any(c.price.fits for c in found):
            return None
        known = ((plan, min(way, len(finder.pricers) - 1)) for plan, way in pool.entries)
        own = ((Plan(c.plan.stages), c.micro_batching) for c in found)
        back = Back(self, running)
        return self.planner.search(finder, found, running, pool, count, back, starts=(*own, *known))

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
            found.append(finders[0].best_of(running.plan, running, "current"))
        found += prospect.own
        if count == 0:
            return self.planner.choose(finders[0], found, running, settled=first), pool
        ahead = Ahead(self, finders, running, path)
        return self.planner.search(
            finders[0], found, running, pool, count, ahead, (self.static, Plan(first.plan.stages))
        )

    def best_path(
        self,
        finders: Sequence[Finder],
        running: Running | None,
        own: Sequence[Candidate] | None = None,
        pool: Pool = NOTHING,
    ) -> Path | None:
        """The shortest path; ``None`` when nothing fits the first batch.

        Args:
            own: what the exact search found for the first batch; default: it is searched.
            pool: with plans that were good before, few others are looked at.
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
            back = self.edge(self.running_of(plans[-1]), self.static)
            path = Path(plans, iterations, switches, back, rest)
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

    def path_of(
        self, finders: Sequence[Finder], running: Running | None, plans: Sequence[Plan]
    ) -> Path:
        """The price of given plans, by the same costs; infinite if one does not fit."""
        found = [f.best_of(plan, None, "given") for f, plan in zip(finders, plans, strict=True)]
        iterations = sum(c.price.seconds for c in found)
        switches = 0.0
        if math.isfinite(iterations):
            if running is not None:
                switches += self.edge(running, found[0].plan)
            for one, other in pairwise(found):
                switches += self.edge(self.running_of(one), other.plan)
            terminal = self.edge(self.running_of(found[-1]), self.static)
        else:
            terminal = 0.0
        return Path(tuple(found), iterations, switches, terminal)

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
            running = self.running_of(finder.best_of(decision.plan, None, "hbsa"))
        return plans

    def running_of(self, candidate: Candidate) -> Running:
        """An iteration of a candidate, as the switch after it sees it."""
        return running_of(self.planner.units, candidate.price)

    def edge(self, running: Running, plan: Plan) -> float:
        """Seconds of a switch, and the margin that every switch must be worth on top."""
        if running.plan.stages == plan.stages:
            return 0.0
        margin = self.planner.options.margin * running.seconds
        return self._switches.price(running, plan).seconds + margin

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
        limit, devices = FEW_CANDIDATES, len(self.planner.units.devices)
        some = [0]  # any number of stages
        if not pool.records:
            limit = MAX_CANDIDATES
            some += [1 << i for i in range(devices.bit_length()) if 1 << i < devices]
            if self.hbsa is not None:
                plans += self.hbsa_plans(finders, running)
            if not self.planner.options.split:
                plans += self.planner.even_plans
        found = [list(finder.best_plans(some)) for finder in finders]
        found[0] = [Plan(c.plan.stages) for c in own] + found[0]
        # In turn from each batch, so that a limit cuts all alike.
        for row in zip_longest(pool.layouts, *found):
            plans += [plan for plan in row if plan is not None]
        kept = list(dict.fromkeys(plans))[:limit]
        layers = []
        for finder in finders:
            priced = [finder.best_of(plan, None, "window") for plan in kept]
            layers.append([c for c in priced if c.price.fits])
        return layers


class Back:
    """What a plan costs besides its iteration: the switch to it, and that back to the static plan.

    A plan may be chosen only where all of that is no more than the static plan's iteration with the
    switch to that: so, whatever comes, the sum over a run stays at or below the static plan's.
    """

    def __init__(self, lookahead: Lookahead, running: Running | None) -> None:
        self._lookahead = lookahead
        self._running = running
        self._bar = math.inf
        self._there: dict[tuple[Stage, ...], float] = {}

    def least(self, plan: Plan) -> float:
        """The switch alone."""
        if self._running is None:
            return 0.0
        if plan.stages not in self._there:
            self._there[plan.stages] = self._lookahead.edge(self._running, plan)
        return self._there[plan.stages]

    def of(self, candidate: Candidate) -> float:
        """All of it."""
        return self.least(candidate.plan) + self._back(candidate)

    def allows(self, candidate: Candidate, seconds: float) -> bool:
        """Whether it keeps the run at or below the static plan; that itself sets the bar."""
        own = seconds + self.least(candidate.plan)
        static = self._lookahead.static
        if candidate.plan.stages == static.stages:
            self._bar = min(self._bar, own)
            return True
        return own + self._back(candidate) <= self._bar

    def _back(self, candidate: Candidate) -> float:
        lookahead = self._lookahead
        return lookahead.edge(lookahead.running_of(candidate), lookahead.static)


class Ahead(Back):
    """The same in view of the window's other batches.

    After the switch to a plan there are three ways on: it stays for the window, the next batch
    joins the best path, or the next batch is back on the static plan. Then the way back from the
    last plan to the static one. Later iterations are priced by the closed form, and count with what
    they take more than the least that is known of.
    """

    def __init__(
        self,
        lookahead: Lookahead,
        finders: Sequence[Finder],
        running: Running | None,
        path: Path,
    ) -> None:
        super().__init__(lookahead, running)
        self._finders = finders
        self._path = path
        self._length = len(path.plans)
        self._static = self._later(lookahead.static)
        self._known: dict[Entry, float] = {}

    def of(self, candidate: Candidate) -> float:
        """All of it."""
        entry = Plan(candidate.plan.stages), candidate.micro_batching
        if entry not in self._known:
            self._known[entry] = self.least(candidate.plan) + self._on(candidate)
        return self._known[entry]

    def _later(self, plan: Plan) -> tuple[Candidate, ...]:
        """A plan for the later batches of the window, each cut as suits it best."""
        return tuple(f.best_of(plan, None, "window") for f in self._finders[1 : self._length])

    def _on(self, candidate: Candidate) -> float:
        """From the first batch on."""
        after = self._lookahead.running_of(candidate)
        ways = [self._static, self._path.plans[1:]]
        if self._length > 1 and candidate.plan.stages != self._lookahead.static.stages:
            ways.append(self._later(Plan(candidate.plan.stages)))
        return max(0.0, min(self._through(after, plans) for plans in ways) - self._path.rest)

    def _through(self, after: Running, plans: Sequence[Candidate]) -> float:
        """Later iterations on given plans, their switches, and that back to the static plan."""
        total = 0.0
        for candidate in plans:
            total += self._lookahead.edge(after, candidate.plan) + candidate.price.seconds
            if not math.isfinite(total):
                return total
            after = self._lookahead.running_of(candidate)
        return total + self._lookahead.edge(after, self._lookahead.static)
