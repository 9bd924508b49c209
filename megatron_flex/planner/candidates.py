"""Plans worth pricing for one batch: the exact search's, V templates, current and static ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.decision import Infeasible
from megatron_flex.planner.lazy import Lazy
from megatron_flex.planner.native_search import Cut, SearchProblem, v_steps
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.plans import plan_of
from megatron_flex.planner.pricing import Price, Pricer
from megatron_flex.planner.simulation import Placed
from megatron_flex.planner.switching import LiveSwitches, Running, SwitchPrice, arrivals
from megatron_flex.planner.tables import Arrivals
from megatron_flex.quantities import size

TIE = 1e-6
"""Costs this close (relative) are equal."""
MANY_DEVICES = 32
"""With more of them less is looked at where it takes long."""
V_FIRST_PASS = (0.35, 0.5, 0.65)
"""Parts of the work that the first pass of a V template covers (docs/planner.md)."""


@dataclass(frozen=True)
class Candidate:
    """A plan for one way of cutting the batch, priced, with the switch that leads to it."""

    price: Price
    micro_batching: int
    change: SwitchPrice | None

    @property
    def plan(self) -> Plan:
        """The plan with its O_plan."""
        return self.price.plan

    @property
    def switch_seconds(self) -> float:
        """Seconds of the switch."""
        return 0.0 if self.change is None else self.change.seconds

    @property
    def seconds(self) -> float:
        """Iteration and switch."""
        return self.price.seconds + self.switch_seconds

    @property
    def moved(self) -> float:
        """Bytes that the switch moves."""
        return 0.0 if self.change is None else self.change.moved


class Finder:
    """Finds and prices candidates for the ways of cutting one batch.

    Args:
        units: costs of single units, for prices.
        elements: costs of what stages are cut between, for searches.
        batches: the ways of cutting the batch to micro-batches.
        switches: prices of switches; shared by the finders of a job.
    """

    def __init__(
        self,
        units: ModelCosts,
        elements: ModelCosts,
        batches: Sequence[Batch],
        switches: LiveSwitches | None = None,
    ) -> None:
        if not batches:
            raise ValueError("the planner needs at least one way of cutting the batch")
        self.units = units
        self.elements = elements
        self.pricers: Sequence[Pricer] = Lazy(len(batches), lambda i: Pricer(units, batches[i]))
        #: What was simulated of the batch, for another look at it (:mod:`trials`).
        self.simulated: dict[tuple[Plan, int], tuple[float, Placed]] = {}
        self._switches = switches or LiveSwitches(units)
        self._best: dict[tuple[int, ...], tuple[Plan, ...]] = {}

    def switch(self, running: Running | None, plan: Plan) -> SwitchPrice | None:
        """The switch from what runs now; ``None`` at the start."""
        return None if running is None else self._switches.price(running, plan)

    def best_of(self, plan: Plan, running: Running | None) -> Candidate:
        """A plan with the micro-batching that suits it best; it need not fit."""
        change = self.switch(running, plan)
        found = [Candidate(pricer.price(plan), i, change) for i, pricer in enumerate(self.pricers)]
        return min(found, key=lambda c: (c.seconds, c.price.shortfall, c.micro_batching))

    def searched(
        self, running: Running | None, stages: Sequence[int] = (0,), *, switching: bool = True
    ) -> Iterator[Candidate]:
        """Plans of the exact search, and in a V where that is asked for.

        Args:
            running: what the plans are priced against.
            stages: searches with at most so many stages each; 0 for any number.
            switching: the search itself knows what arrives late (else: the best plan to be on).
        """
        late = None if running is None or not switching else arrivals(self.elements, running)
        bounds = [self._bound(pricer.batch) for pricer in self.pricers]
        best = math.inf
        for i in sorted(range(len(bounds)), key=bounds.__getitem__):
            if bounds[i] >= best:
                break
            for plan in self._plans(self.pricers[i].batch, late, stages):
                change = self.switch(running, plan)
                candidate = Candidate(self.pricers[i].price(plan), i, change)
                best = min(best, candidate.seconds)
                yield candidate

    def best_plans(self, stages: Sequence[int]) -> tuple[Plan, ...]:
        """Layouts of :meth:`searched` without a running plan, each once; searched once."""
        key = tuple(stages)
        if key not in self._best:
            found = (Plan(c.plan.stages) for c in self.searched(None, stages))
            self._best[key] = tuple(dict.fromkeys(found))
        return self._best[key]

    def _bound(self, batch: Batch) -> float:
        """No plan for this micro-batching is faster (docs/planner.md)."""
        coefficients = (self.units.forward + self.units.backward).sum(axis=1)
        alone = coefficients[0] + coefficients[1] * batch.tokens + coefficients[2] * batch.squares
        return max(float(alone.sum()) / self.units.num_devices, float(alone.max()))

    def _plans(self, batch: Batch, late: Arrivals | None, stages: Sequence[int]) -> Iterator[Plan]:
        granule = self.elements.granule
        tables = self.elements.tables(batch, late, granule)
        straight = SearchProblem(tables, granule=granule)
        cuts: list[Cut | None] = []
        # In a V there is more than one unit a device.
        v = self.elements.options.v and tables.num_elements > 1
        if self.elements.options.straight or not v:
            cuts += [straight.search(n) for n in stages]
        if any(cut is not None and cut.cost <= tables.chain * (1.0 + TIE) for cut in cuts):
            cuts.append(straight.search(chain=False))
        if v:
            for first_pass in V_FIRST_PASS:
                steps = v_steps(tables.work, first_pass)
                template = SearchProblem(tables, steps, granule)
                cuts.append(template.search())
        yield from (plan_of(tables, cut.groups) for cut in cuts if cut is not None)

    def infeasible(self, best: Price | None = None) -> Infeasible:
        """Why nothing fits.

        ``best``: the plan that lacks least, looked at by its program; without it, the least
        shortfall of the bound over the ways of cutting the batch.
        """
        options = self.units.options
        ways = {
            "recompute": options.recompute,
            "offload": options.offload_optimizer or options.offload_activations,
        }
        names = [name for name, on in ways.items() if on and options.memory_optimisation]
        allowed = f"with {' and '.join(names)}" if names else ""
        advice = (
            "; raise --flexpipe-memory-budget-gb, lower --micro-batch-tokens, limit samples with"
            " --max-sample-length and --overlong, or use more devices"
        )
        if best is not None:
            most = max(best.device_bytes)
            tokens = max(float(pricer.batch.tokens.max()) for pricer in self.pricers)
            return Infeasible(
                f"no plan fits: with a largest micro-batch of {tokens:.0f} tokens, device"
                f" {best.device_bytes.index(most)} needs {size(most)} {allowed}".rstrip()
                + f" in the best of them ({best.plan}), {size(best.shortfall)} more than what of"
                f" its {size(self.units.budget)} may be used{advice}",
                math.ceil(best.shortfall),
            )
        found: tuple[int, float] | None = None
        for pricer in self.pricers:
            granule = self.elements.granule
            tables = self.elements.tables(pricer.batch, None, granule)
            short = SearchProblem(tables, granule=granule).shortfall()
            if found is None or short < found[0]:
                found = (short, float(pricer.batch.tokens.max()))
        assert found is not None
        short, tokens = found
        return Infeasible(
            f"no plan fits: with a largest micro-batch of {tokens:.0f} tokens every one of"
            f" {self.units.num_devices} devices lacks {size(short)} of"
            f" {size(self.units.budget)} {allowed}".rstrip()
            + advice,
            short,
        )


def rank(
    candidate: Candidate, current: Plan | None, seconds: float
) -> tuple[float, bool, float, int, str]:
    """Ties in this order: cost (1e-6 relative), keep, fewest bytes moved, fewest stages, text."""
    rounded = math.inf
    if math.isfinite(seconds) and seconds > 0:
        rounded = round(math.log(seconds) / TIE)
    away = current is None or candidate.plan.stages != current.stages
    return rounded, away, candidate.moved, len(candidate.plan.stages), str(candidate.plan)


def distinct(found: Sequence[Candidate]) -> list[Candidate]:
    """One candidate for each layout and micro-batching."""
    return list({(c.plan.stages, c.micro_batching): c for c in reversed(found)}.values())
