"""One configuration over many iterations: a record of each, and where to go on from.

Nothing depends on clocks or on chance: the same arguments give the same records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatron_flex.cluster.cluster import description
from megatron_flex.data.cut import Cut
from megatron_flex.planner.build import Batch
from megatron_flex.planner.candidates import MANY_DEVICES, Finder
from megatron_flex.planner.decision import Decision
from megatron_flex.planner.hbsa import Hbsa, PeakFit
from megatron_flex.planner.lookahead import Lookahead
from megatron_flex.planner.messages import Setup
from megatron_flex.planner.optimise import optimised
from megatron_flex.planner.pace import Pace, part_of
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.plans import groups_of
from megatron_flex.planner.pool import Pool, Record
from megatron_flex.planner.pricing import Pricer
from megatron_flex.planner.search import DEFAULT_SIMULATIONS
from megatron_flex.planner.simulation import Prediction
from megatron_flex.planner.switching import Running
from megatron_flex.planner.ways import batch_of, ways
from megatron_flex.simulator.changes import stall_seconds
from megatron_flex.simulator.flags import planned_flags, static_flags
from megatron_flex.simulator.presets import PLANNED, STATIC, Planned, Static, one_plan, open_cut
from megatron_flex.simulator.records import record_of
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.sources import Lengths, Part, Source, extremes, whole
from megatron_flex.simulator.static import Tuned, tune

EXTREMES = 4
"""Batches with the longest samples, and with most tokens, that a static plan must fit."""
PAPER_MEMORY = 80e9
PAPER_PEAKS = {
    (96, 1024): PeakFit(113e9, 0.059e9),
    (16, 4096): PeakFit(143e9, 0.083e9),
}
"""The paper's totals of memory (its table 2) as lines in the longest sample, by layers and hidden
size: BERT96 and GPT-3.35B."""


@dataclass(frozen=True)
class Span:
    """What is simulated of a source.

    Attributes:
        iterations: in all.
        tuning: batches, evenly spread over them, that static plans are tuned over.
        simulations: of a decision; ``None``: as many as fit into 30 % of an iteration at the rate
            that a run assumes before it has measured any.
        programs: decisions look at the very programs, as in training; else at placements.
        every: of so many iterations one is searched for; the others have a first answer, as in
            training where the planner is late: the best of what was good before.
    """

    source: Source
    iterations: int
    tuning: int = 16
    simulations: int | None = None
    programs: bool = False
    every: int = 1

    def of(self, setting: Setting) -> Span:
        """The same for devices that stand for several."""
        if setting.width == 1:
            return self
        source = Part(self.source, setting.width, setting.cost, setting.devices)
        return replace(self, source=source)

    @property
    def sample(self) -> list[Lengths]:
        """Batches to tune over."""
        number = min(self.tuning, self.iterations)
        return [self.source.batch(k * self.iterations // number) for k in range(number)]

    @property
    def worst(self) -> list[Lengths]:
        """Batches that need most memory."""
        longest = extremes(self.source, self.iterations, max, EXTREMES)
        fullest = extremes(self.source, self.iterations, sum, EXTREMES)
        return [self.source.batch(k) for k in dict.fromkeys((*longest, *fullest))]


class Simulation(Protocol):
    """Iterations one after the other."""

    @property
    def about(self) -> str:
        """What it has settled on before the first iteration, in words."""

    @property
    def flags(self) -> list[str]:
        """Of the trainer, to run it so; empty: it can't."""

    def step(self, number: int) -> dict[str, Any]:
        """The record of iteration ``number``, from 0, after the ones before it."""

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` goes on from; JSON can hold it."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as after :meth:`state`."""


def open_simulation(name: str, setting: Setting, span: Span) -> Simulation:
    """The simulation of a configuration by name.

    Raises:
        ValueError: there is no such configuration, or nothing fits.
    """
    if name in STATIC:
        return StaticRun(setting, span, STATIC[name])
    if name in PLANNED:
        return PlannedRun(setting, span, PLANNED[name])
    raise ValueError(
        f"no configuration is named '{name}'; there are {', '.join((*PLANNED, *STATIC))}"
    )


class StaticRun:
    """A plan that stays."""

    def __init__(self, setting: Setting, span: Span, preset: Static) -> None:
        self._setting = setting
        self._span = span
        self.tuned = tuned(setting, span, preset)

    @property
    def about(self) -> str:
        """See :class:`Simulation`."""
        return str(self.tuned)

    @property
    def flags(self) -> list[str]:
        """See :class:`Simulation`."""
        return static_flags(self._setting, self.tuned)

    def step(self, number: int) -> dict[str, Any]:
        """See :class:`Simulation`."""
        lengths = self._span.source.batch(number)
        ran = self.tuned.run(lengths)
        costs = self.tuned.runner.costs
        swap = swap_seconds(Pricer(costs, ran.batch), ran.plan)
        plan = replace(ran.plan, schedule=ran.prediction.schedule, cut=ran.batch.target)
        record = record_of(
            self._setting, number, lengths, plan, ran.batch, ran.prediction, swap=swap,
            whole=whole(self._span.source, number),
        )  # fmt: skip
        if ran.rescued:
            record["action"] = "more is recomputed"
        return record

    def state(self) -> dict[str, Any]:
        """See :class:`Simulation`."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See :class:`Simulation`."""


def tuned(setting: Setting, span: Span, preset: Static) -> Tuned:
    """The best static plan of a preset for a span of batches."""
    sample = span.sample
    return tune(preset.runners(setting, sample), sample, span.worst)


class PlannedRun:
    """A planner decides before every iteration, with what it knows of the ones before."""

    def __init__(self, setting: Setting, span: Span, preset: Planned) -> None:
        self._setting = setting
        self._span = span
        self._preset = preset
        self._planner: Planner = setting.planner(**options_of(preset, span.programs))
        self._cut = cut_of(preset, setting)
        self._finders: dict[int, Finder] = {}
        self._running: Running | None = None
        self._plan, self._last = "", 0
        self._pool = Pool.empty()
        chosen = self._planner.options
        self._hbsa = Hbsa(self._planner, *self._totals)
        self._lookahead: Lookahead | None = None
        if chosen.planner == "lookahead":
            self._lookahead = Lookahead(self._planner, self._static(), self._hbsa)

    @property
    def _totals(self) -> tuple[PeakFit | None, float | None]:
        """The paper's memory, where it gives one."""
        config = self._setting.config
        fit = PAPER_PEAKS.get((config.num_layers, config.hidden_size))
        return (fit, PAPER_MEMORY) if self._preset.paper and fit else (None, None)

    def _static(self) -> Plan:
        """The plan that windows end with."""
        if self._preset.tuned:
            preset = one_plan(self._setting, self._preset)
            return Plan(tuned(self._setting, self._span, preset).plan.stages)
        window = [self._ways(k) for k in range(self._planner.options.lookahead)]
        return self._planner.best_static(window)

    @property
    def about(self) -> str:
        """See :class:`Simulation`."""
        return "" if self._lookahead is None else f"windows end with {self._lookahead.static}"

    @property
    def flags(self) -> list[str]:
        """See :class:`Simulation`."""
        static = self._lookahead.static if self._lookahead is not None else None
        return planned_flags(self._setting, self._preset, static)

    def _ways(self, number: int) -> Sequence[Batch]:
        return ways(self._cut, self._span.source.batch(number), self._setting.devices)

    def _finder(self, number: int) -> Finder:
        """That of an iteration, kept while windows hold it."""
        if number not in self._finders:
            self._finders[number] = self._planner.finder(self._ways(number))
        return self._finders[number]

    def step(self, number: int) -> dict[str, Any]:
        """See :class:`Simulation`."""
        lengths = self._span.source.batch(number)
        decision = self._decide(number, lengths)
        pricer = self._finder(number).pricers[decision.micro_batching]
        outcome, besides = self._outcome(decision, pricer)
        stall = 0.0
        if self._running is not None:
            stall = stall_seconds(
                self._planner.units, self._running, decision.plan, self._preset.switch
            )
        record = record_of(
            self._setting, number, lengths, decision.plan, pricer.batch, outcome,
            swap=besides, stall=stall, decision=decision, switched=self._switched(decision.plan),
            whole=whole(self._span.source, number),
        )  # fmt: skip
        self._finders.pop(number)
        self._last = number
        self._go_on(decision.plan, pricer, lengths, outcome.seconds + besides)
        return record

    def _switched(self, plan: Plan) -> bool:
        return self._running is not None and self._running.plan.stages != plan.stages

    def _decide(self, number: int, lengths: Lengths) -> Decision:
        if self._lookahead is None:
            batch = self._finder(number).pricers[0].batch
            return self._hbsa.decide(batch, self._running, float(max(lengths)))
        if number % self._span.every:
            finder = self._finder(number)
            answer = self._lookahead.first(finder, self._running, self._pool, self._count())
            if answer is not None:
                decision, self._pool = answer
                return decision
        many = self._setting.width > 1 or self._planner.units.num_devices > MANY_DEVICES
        first = self._running is None and many  # as in training
        window = range(number, number + (1 if first else self._planner.options.lookahead))
        finders = [self._finder(k) for k in window]
        decision, self._pool = self._lookahead.decide_among(
            finders, self._running, self._pool, self._count()
        )
        return decision

    def _count(self) -> int:
        """Simulations of the decision."""
        if self._running is None:
            return DEFAULT_SIMULATIONS  # no iteration waits for it
        if self._span.simulations is not None:
            return self._span.simulations
        # At the rate of a run's begin, so that nothing depends on clocks.
        return Pace(part_of(self._setting.width)).simulations(self._running.seconds)

    def _outcome(self, decision: Decision, pricer: Pricer) -> tuple[Prediction, float]:
        """What the iteration takes, and seconds besides: waits for the host."""
        plan, batch = decision.plan, pricer.batch
        if self._span.programs:
            found = self._planner.maker.keep(plan, batch).prediction
        else:
            known = self._planner.predicted(plan, batch)
            assert known is not None  # only a finite stop gives None
            found = known
        if self._hbsa.peak is not None and self._lookahead is None:
            own = decision.predicted  # in totals, no single units
            return found, own.recompute_seconds + own.swap_seconds
        return found, swap_seconds(pricer, plan)

    def _go_on(self, plan: Plan, pricer: Pricer, lengths: Lengths, seconds: float) -> None:
        peak = self._hbsa.peak
        if peak is not None and self._lookahead is None:
            free = max(0.0, PAPER_MEMORY - peak(float(max(lengths))) / len(plan.stages))
            self._running = Running(plan, seconds, (free,) * self._setting.cluster.world_size)
        else:
            self._running = self._planner.running_in(plan, pricer)
        self._plan = str(plan)

    def state(self) -> dict[str, Any]:
        """See :class:`Simulation`."""
        assert self._running is not None
        records = [
            [str(plan), way, record.loss, record.useful]
            for (plan, way), record in self._pool.records.items()
        ]
        return {
            "plan": self._plan,
            "last": self._last,
            "seconds": self._running.seconds,
            "pool": records,
            "batches": self._pool.batches,
            "credit": self._pool.credit,
            "forgone": [[str(Plan(s)), lost] for s, lost in self._pool.forgone.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See :class:`Simulation`; the iteration ``state["last"]`` was the last one."""
        records = {
            (Plan.parse(plan), way): Record(loss, useful)
            for plan, way, loss, useful in state["pool"]
        }
        forgone = {Plan.parse(plan).stages: lost for plan, lost in state["forgone"]}
        self._pool = Pool(records, state["batches"], state["credit"], forgone)
        lengths = self._span.source.batch(state["last"])
        plan = Plan.parse(state["plan"])
        pricer = Pricer(self._planner.units, batch_of(self._cut, lengths, plan.cut))
        self._go_on(plan, pricer, lengths, state["seconds"])


def options_of(preset: Planned, programs: bool = False) -> dict[str, Any]:
    """A planner's options: as in training, but for what a preset says."""
    return {"schedule": "auto", "exact_memory": programs, **preset.options}


def cut_of(preset: Planned, setting: Setting) -> Cut:
    """How a preset's batches are cut."""
    if preset.tokens is None:
        return open_cut(setting, preset.sliced)
    return Cut(preset.tokens, cost=setting.cost)


def setup_of(name: str, setting: Setting) -> Setup | None:
    """What programs can be made from again; ``None`` where batches are not cut as in training."""
    if name == "static-slices":
        planner, cut = setting.planner(schedule="zb"), open_cut(setting)
    elif name in PLANNED:
        preset = PLANNED[name]
        planner, cut = setting.planner(**options_of(preset)), cut_of(preset, setting)
    else:
        return None
    static = str(planner.even_plans[-1])
    profile = setting.profile.to_json()
    return Setup(
        setting.config, description(setting.cluster), profile, planner.options, cut, static
    )


def swap_seconds(pricer: Pricer, plan: Plan) -> float:
    """Seconds that a plan waits for the host."""
    if not (plan.o_plan.optimizer or plan.o_plan.activations):
        return 0.0
    tables = pricer.problem_of(plan).tables
    groups = groups_of(tables, plan)
    return max(optimised(tables, group, plan.o_plan).swap_seconds for group in groups)
