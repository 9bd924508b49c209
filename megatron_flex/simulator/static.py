"""Plans that stay for a whole run, tuned as their users would: layout, cut and recompute.

Every even layout is tried with every variant of a baseline (schedule, micro-batches) over a sample
of the run's own batches, by the simulator, those first that the closed form thinks fastest. What is
recomputed is fixed for the run, too, where the baseline knows no better: as little as lets every
batch of the sample, and those that need most memory, fit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.plan import OPlan, Plan, PlanError
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.pricing import Pricer
from megatron_flex.planner.simulation import Placed, Prediction, op_costs, prediction_of
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.timeline import iteration_seconds
from megatron_flex.simulator.batching import Batching
from megatron_flex.simulator.setting import Setting, place
from megatron_flex.simulator.sources import Lengths

REMEMBERED = 256
"""Batches that a runner remembers as it has cut them."""
SEARCHED = 25
"""Simulations for each batch of the sample where layouts are searched for."""
DOUBT = 1.25
"""What the closed form puts so far above the best simulated is not simulated: it is seldom above
the simulation at all, and by less (docs/planner.md)."""


@dataclass(frozen=True)
class Variant:
    """What a baseline may choose besides the layout.

    Attributes:
        unit: what stages are cut between.
        even: only Megatron's even layouts; else also what the planner finds for the sample.
        adaptive: recompute is chosen for every batch.
        offload: state and activations may be on the host.
        saves: memory optimisation may be used at all.
        folds: layouts in a V may be.
    """

    schedule: str
    batching: Batching
    unit: str = "layer"
    even: bool = True
    adaptive: bool = False
    offload: bool = False
    saves: bool = True
    folds: bool = True


@dataclass(frozen=True)
class Ran:
    """One iteration.

    Attributes:
        plan: with the memory optimisation that it ran with.
        batch: as it was cut.
        prediction: its time and memory.
        rescued: more was recomputed than the run had settled on, for else it would not fit.
    """

    plan: Plan
    batch: Batch
    prediction: Prediction
    rescued: bool = False

    @property
    def seconds(self) -> float:
        """Of the iteration."""
        return self.prediction.seconds


class Runner:
    """Runs batches under static plans of one variant."""

    def __init__(self, setting: Setting, variant: Variant) -> None:
        self.variant = variant
        self.planner = self._planner(setting)
        self._known: OrderedDict[object, tuple[Pricer, ...]] = OrderedDict()

    def _planner(self, setting: Setting) -> Planner:
        v = self.variant
        return setting.planner(
            schedule=v.schedule, unit=v.unit,
            offload_optimizer=v.offload, offload_activations=v.offload,
            memory_optimisation=v.saves, folds=v.folds,
        )  # fmt: skip

    @property
    def costs(self) -> ModelCosts:
        """Of single units."""
        return self.planner.units

    def plans(self, sample: Sequence[Lengths]) -> Iterable[Plan]:
        """Layouts to try."""
        even = self.planner.even_plans
        found = dict.fromkeys(Plan(p.stages) for p in even)
        if not self.variant.even:
            pool = Pool.empty()
            for lengths in sample:
                batches = [pricer.batch for pricer in self.ways(even[0], lengths)]
                decision, pool = self.planner.decide_with(pool, batches, None, count=SEARCHED)
                found[Plan(decision.plan.stages)] = None
        return found

    def ways(self, plan: Plan, lengths: Lengths) -> tuple[Pricer, ...]:
        """The ways of cutting a batch under a plan."""
        batching = self.variant.batching
        key = (lengths, plan.stages) if batching.by_plan else lengths
        if key not in self._known:
            batches = batching.ways(lengths, plan, self.costs)
            self._known[key] = tuple(Pricer(self.costs, batch) for batch in batches)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return self._known[key]

    def price(self, plan: Plan, lengths: Lengths) -> tuple[float, OPlan]:
        """Seconds by the closed form, and the memory optimisation that it takes."""
        prices = [pricer.price(plan) for pricer in self.ways(plan, lengths)]
        best = min(prices, key=lambda p: p.seconds, default=None)
        return (math.inf, OPlan()) if best is None else (best.seconds, best.plan.o_plan)

    def seconds(
        self, plan: Plan, lengths: Lengths, settled: OPlan | None, stop: float = math.inf
    ) -> float:
        """Of one iteration in the best way of cutting, at least ``stop`` where that is no less.

        ``settled``: what is recomputed all the time; ``None``: what each batch needs.
        """
        best = stop
        for pricer in self.ways(plan, lengths):
            price = pricer.price(plan)
            if price.fits:
                chosen, _ = _settle(price.plan, settled)
                best = min(best, self._placed(chosen, pricer.batch, best)[0])
        return best

    def run(self, plan: Plan, lengths: Lengths, settled: OPlan | None) -> Ran | None:
        """The same iteration in full; ``None``: it does not fit."""
        best, found = math.inf, None
        for pricer in self.ways(plan, lengths):
            price = pricer.price(plan)
            if not price.fits:
                continue
            chosen, rescued = _settle(price.plan, settled)
            seconds, placed = self._placed(chosen, pricer.batch, best)
            if placed is not None and seconds < best:
                best, found = seconds, (chosen, pricer.batch, placed, rescued)
        if found is None:
            return None
        chosen, batch, placed, rescued = found
        return Ran(chosen, batch, prediction_of(self.costs, chosen, batch, placed), rescued)

    def _placed(self, plan: Plan, batch: Batch, stop: float) -> tuple[float, Placed | None]:
        """Seconds of a plan, at least ``stop`` where that is no less, and its operations."""
        placed = place(self.costs, plan, batch, op=self.op_costs(plan, batch), stop=stop)
        if placed is None:
            return stop, None
        return iteration_seconds(placed.placement, self.costs.layers), placed

    def op_costs(self, plan: Plan, batch: Batch) -> OpCosts:
        """Costs of every operation."""
        return op_costs(self.costs, plan, batch)


def _settle(plan: Plan, settled: OPlan | None) -> tuple[Plan, bool]:
    """A plan that fits, with what the run has settled on besides; whether that was too little."""
    if settled is None:
        return plan, False
    both = _union([settled, plan.o_plan])
    return replace(plan, o_plan=both), both != settled


@dataclass(frozen=True)
class Tuned:
    """A baseline as its users would run it.

    Attributes:
        settled: what is recomputed all the time; ``None``: chosen for every batch.
        tried: combinations that were compared.
        seconds: mean of an iteration over the sample.
    """

    runner: Runner
    plan: Plan
    settled: OPlan | None
    tried: int
    seconds: float

    def run(self, lengths: Lengths) -> Ran:
        """One iteration.

        Raises:
            PlanError: it does not fit, whatever is recomputed.
        """
        found = self.runner.run(self.plan, lengths, self.settled)
        if found is None:
            raise PlanError(
                f"a batch whose longest sample has {max(lengths)} tokens does not fit the plan"
                f" '{self.plan}' that is the best for the sample of batches"
            )
        return found

    def __str__(self) -> str:
        variant = self.runner.variant
        words = f"{self.plan} ; schedule {variant.schedule} ({variant.batching.name})"
        if self.settled:
            words += f" ({self.settled})"
        return words


@dataclass(frozen=True)
class _Entry:
    seconds: float
    runner: Runner
    plan: Plan
    settled: OPlan | None


def tune(runners: Sequence[Runner], sample: Sequence[Lengths], worst: Sequence[Lengths]) -> Tuned:
    """The best combination over the sample that fits ``worst``, too.

    Raises:
        PlanError: nothing fits.
    """
    entries: list[_Entry] = []
    for runner in runners:
        for plan in runner.plans(sample):
            priced = [runner.price(plan, lengths) for lengths in (*sample, *worst)]
            total = sum(seconds for seconds, _ in priced[: len(sample)])
            if all(math.isfinite(seconds) for seconds, _ in priced):
                settled = None if runner.variant.adaptive else _union([o for _, o in priced])
                entries.append(_Entry(total, runner, plan, settled))
    entries.sort(key=lambda e: e.seconds)
    best, least = None, math.inf
    for entry in entries:
        if entry.seconds > DOUBT * least:
            break
        total = 0.0
        for lengths in sample:
            total += entry.runner.seconds(entry.plan, lengths, entry.settled, least - total)
            if total >= least:
                break
        if total < least:
            best, least = entry, total
    if best is None:
        raise PlanError(
            "no even layout fits all batches: use more devices, a larger budget, or shorter samples"
        )
    return Tuned(best.runner, best.plan, best.settled, len(entries), least / len(sample))


def _union(plans: Sequence[OPlan]) -> OPlan:
    """All of the memory optimisation of several."""

    def units(name: str) -> tuple[int, ...]:
        return tuple(sorted({u for p in plans for u in getattr(p, name)}))

    recompute = units("recompute")
    return OPlan(
        recompute=recompute,
        optimizer=units("optimizer"),
        activations=tuple(u for u in units("activations") if u not in recompute),
        shard=units("shard"),
        lean=any(p.lean for p in plans),
    )
