"""Plans that stay for a whole run, tuned as their users would: layout, cut and recompute.

Every even layout is tried with every variant of a baseline (schedule, micro-batches) over a sample
of the run's own batches, by the simulator, those first that the closed form thinks fastest. What is
recomputed is fixed for the run, too, where the baseline knows no better: as little as lets every
batch of the sample, and those that need most memory, fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.plan import OPlan, Plan, PlanError
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.pricing import Pricer
from megatron_flex.planner.simulation import Prediction
from megatron_flex.simulator.batching import Batching
from megatron_flex.simulator.setting import Setting, outcome
from megatron_flex.simulator.sources import Lengths


@dataclass(frozen=True)
class Variant:
    """What a baseline may choose besides the layout.

    Attributes:
        unit: what stages are cut between.
        even: only Megatron's even layouts; else also what the planner finds for the sample.
        adaptive: recompute is chosen for every batch.
        offload: state and activations may be on the host.
    """

    schedule: str
    batching: Batching
    unit: str = "layer"
    even: bool = True
    adaptive: bool = False
    offload: bool = False


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

    def _planner(self, setting: Setting) -> Planner:
        v = self.variant
        return setting.planner(
            schedule=v.schedule, unit=v.unit,
            offload_optimizer=v.offload, offload_activations=v.offload,
        )  # fmt: skip

    @property
    def costs(self) -> ModelCosts:
        """Of single units."""
        return self.planner.units

    def plans(self, sample: Sequence[Lengths]) -> Iterable[Plan]:
        """Layouts to try."""
        found = dict.fromkeys(Plan(p.stages) for p in self.planner.even_plans)
        if not self.variant.even:
            for lengths in sample:
                ways = self.ways(self.planner.even_plans[0], lengths)
                decision = self.planner.decide(ways, None)
                found[Plan(decision.plan.stages)] = None
        return found

    def ways(self, plan: Plan, lengths: Lengths) -> tuple[Batch, ...]:
        """The ways of cutting a batch under a plan."""
        return self.variant.batching.ways(lengths, plan, self.costs)

    def price(self, plan: Plan, lengths: Lengths) -> tuple[float, OPlan]:
        """Seconds by the closed form, and the memory optimisation that it takes."""
        found = math.inf, OPlan()
        for batch in self.ways(plan, lengths):
            price = Pricer(self.costs, batch).price(plan)
            if price.seconds < found[0]:
                found = price.seconds, price.plan.o_plan
        return found

    def run(
        self, plan: Plan, lengths: Lengths, settled: OPlan | None, stop: float = math.inf
    ) -> Ran | None:
        """One iteration in the best way of cutting; ``None``: it does not fit, or takes longer.

        ``settled``: what is recomputed all the time; ``None``: what each batch needs.
        """
        best: Ran | None = None
        for batch in self.ways(plan, lengths):
            price = Pricer(self.costs, batch).price(plan)
            limit = stop if best is None else best.seconds
            if not price.fits:
                continue
            own, rescued = price.plan.o_plan, False
            if settled is not None:
                both = _union([settled, own])
                rescued, own = both != settled, both
            chosen = replace(price.plan, o_plan=own)
            found = self.outcome(chosen, batch, limit)
            if found is not None:
                best = Ran(chosen, batch, found, rescued)
        return best

    def outcome(self, plan: Plan, batch: Batch, stop: float) -> Prediction | None:
        """See :func:`~megatron_flex.simulator.setting.outcome`."""
        return outcome(self.costs, plan, batch, stop=stop)


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


def tune(
    runners: Sequence[Runner],
    sample: Sequence[Lengths],
    worst: Sequence[Lengths],
    progress: Callable[[], object] = lambda: None,
) -> Tuned:
    """The best combination over the sample that fits ``worst``, too.

    Args:
        progress: called after every runner.

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
        progress()
    entries.sort(key=lambda e: e.seconds)
    best, least = None, math.inf
    for entry in entries:
        total = 0.0
        for lengths in sample:
            ran = entry.runner.run(entry.plan, lengths, entry.settled, least - total)
            total += math.inf if ran is None else ran.seconds
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
