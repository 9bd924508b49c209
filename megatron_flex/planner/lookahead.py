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
one of the next window's paths. All of this holds for predicted costs, by the closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_flex.planner.build import Batch
from megatron_flex.planner.candidates import Candidate, Finder
from megatron_flex.planner.decision import Decision
from megatron_flex.planner.hbsa import Hbsa
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.planner import Planner, running_of
from megatron_flex.planner.switching import Running

MAX_CANDIDATES = 32
_Reached = tuple[float, float, float, tuple[Candidate, ...]]


@dataclass(frozen=True)
class Path:
    """A sequence of plans for a window of batches.

    Attributes:
        plans: the candidate of each batch, priced for it.
        iterations: seconds of all iterations.
        switches: seconds of all switches with their margins, the first one included.
        terminal: seconds of the switch back to the static plan after the window.
    """

    plans: tuple[Candidate, ...]
    iterations: float
    switches: float
    terminal: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.iterations + self.switches + self.terminal


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
        """The decision for the first batch of the window: the first plan of the best path.

        Args:
            window: for each coming batch, the ways of cutting it to micro-batches.
            running: the iteration before; ``None`` at the start.

        Raises:
            Infeasible: no plan fits the first batch. (Later batches that fit no plan end the
                window before them.)
        """
        return self.decide_among([self.planner.finder(ways) for ways in window], running)

    def decide_among(self, finders: Sequence[Finder], running: Running | None) -> Decision:
        """:meth:`decide`, with finders that the caller keeps from window to window."""
        path = self.best_path(finders, running)
        if path is None:  # the last word is the planner's
            return self.planner.choose(finders[0], [], running)
        first = path.plans[0]
        found = [first]
        if running is not None:
            found.append(finders[0].best_of(running.plan, running, "current"))
        found += finders[0].searched(running)
        return self.planner.choose(finders[0], found, running, settled=first)

    def best_path(self, finders: Sequence[Finder], running: Running | None) -> Path | None:
        """The shortest path; ``None`` when nothing fits the first batch."""
        layers = self._candidates(finders, running)
        # The cheapest way to run each candidate now: all seconds, iterations, switches, plans.
        best: list[_Reached] = []
        for number, layer in enumerate(layers):
            if not layer:
                break
            if number == 0:
                best = [self._start(running, candidate) for candidate in layer]
            else:
                best = [self._extend(best, candidate) for candidate in layer]
            best.sort(key=lambda reached: (reached[0], len(reached[3][-1].plan.stages)))
        shortest: Path | None = None
        for total, iterations, switches, plans in best:
            if shortest is not None and total >= shortest.seconds:
                break  # and so are all that follow: a switch never takes less than nothing
            back = self._edge(self._running(plans[-1]), self.static)
            path = Path(plans, iterations, switches, back)
            if shortest is None or path.seconds < shortest.seconds:
                shortest = path
        return shortest

    def _start(self, running: Running | None, candidate: Candidate) -> _Reached:
        """The first batch with one candidate."""
        own = candidate.price.seconds
        change = 0.0 if running is None else self._edge(running, candidate.plan)
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
            edge = self._edge(self._running(reached[3][-1]), candidate.plan)
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
                switches += self._edge(running, found[0].plan)
            for one, other in pairwise(found):
                switches += self._edge(self._running(one), other.plan)
            terminal = self._edge(self._running(found[-1]), self.static)
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
            running = self._running(finder.best_of(decision.plan, None, "hbsa"))
        return plans

    def _running(self, candidate: Candidate) -> Running:
        return running_of(self.planner.units, candidate.price)

    def _edge(self, running: Running, plan: Plan) -> float:
        """Seconds of a switch, and the margin that every switch must be worth on top."""
        if running.plan.stages == plan.stages:
            return 0.0
        margin = self.planner.options.margin * running.seconds
        return self._switches.price(running, plan).seconds + margin

    def _candidates(
        self, finders: Sequence[Finder], running: Running | None
    ) -> list[list[Candidate]]:
        """Every candidate plan that fits, for every batch."""
        plans: list[Plan] = [self.static]
        if running is not None:
            plans.append(Plan(running.plan.stages))
        if self.hbsa is not None:
            plans += self.hbsa_plans(finders, running)
        devices = len(self.planner.units.devices)
        some = [0] + [1 << i for i in range(devices.bit_length()) if 1 << i < devices]
        found = [list(finder.best_plans(some)) for finder in finders]
        if running is not None:
            found[0] = [Plan(c.plan.stages) for c in finders[0].searched(running)] + found[0]
        if not self.planner.options.split:
            plans += self.planner.even_plans
        # In turn from each batch, so that a limit cuts all alike.
        for rank in range(max(map(len, found), default=0)):
            plans += [row[rank] for row in found if rank < len(row)]
        kept = list(dict.fromkeys(plans))[:MAX_CANDIDATES]
        layers = []
        for finder in finders:
            priced = [finder.best_of(plan, None, "window") for plan in kept]
            layers.append([c for c in priced if c.price.fits])
        return layers
