"""One iteration from its place in the data to its result: batch, micro-batches, program, run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_flex.config.config import Config
from megatron_flex.data.batches import BatchSource
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.data.microbatches import CostCoefficients, cut_by_count, cut_by_tokens
from megatron_flex.loop.reader import Reader
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.fit import allowance, room_for_messages
from megatron_flex.planner.flops import model_work, total_work
from megatron_flex.planner.footprint import Footprint
from megatron_flex.planner.plan import Plan
from megatron_flex.programs import build_program
from megatron_flex.runtime.executor import (
    Executor,
    StepInputs,
    StepResult,
    reduction_groups,
    used_groups,
)
from megatron_flex.runtime.memory import Expected
from megatron_flex.runtime.optimizer import StepSize
from megatron_flex.schedule.emit import switch_only
from megatron_flex.schedule.instructions import Program
from megatron_flex.schedule.transition import Transition, transition
from megatron_flex.schedule.validate import validate

# Programs that were validated are remembered by plan and number of micro-batches, up to this many.
_REMEMBERED = 4096


def cost_coefficients(config: ModelConfig) -> CostCoefficients:
    """What a sample costs, for cutting micro-batches: FLOPs, normalised to 1 a token.

    Fixed for a run and kept in the checkpoint, so that a resumed run cuts alike.
    """
    work = total_work(model_work(config))
    return CostCoefficients(1.0, work.quadratic / work.linear)


def cut(
    config: Config, batch: GlobalBatch, coefficients: CostCoefficients
) -> tuple[MicroBatch, ...]:
    """The micro-batches of a global batch, by the flags alone."""
    budget = config.data.micro_batch_tokens
    if budget is not None:
        return cut_by_tokens(batch, budget, coefficients)
    size = config.training.micro_batch_size
    assert size is not None, "arguments were checked"
    return cut_by_count(batch, size)


@dataclass
class Iterations:
    """Runs iterations; ``plan`` is the layout that the devices are in.

    ``last``: the program that ran last, and its micro-batches.
    """

    config: Config
    plan: Plan
    executor: Executor
    coefficients: CostCoefficients

    def __post_init__(self) -> None:
        self.last: tuple[Program, tuple[MicroBatch, ...]] | None = None
        self._reader = Reader(self.config.data.num_workers)
        self._validated: set[tuple[Plan, Plan | None, int, bool]] = set()
        f = self.config.flexpipe
        model = self.executor.holdings.config
        self._footprint = Footprint(model, exact=f.flexpipe_bitwise)
        self._budget = f.memory_budget

    @property
    def room(self) -> float:
        """Bytes for messages that peers have not taken, which the plan of ``last`` left free."""
        if self.last is None:
            return 0.0
        return self._room(*self.last)

    def _room(self, program: Program, micro_batches: Sequence[MicroBatch]) -> float:
        largest = float(max(m.tokens for m in micro_batches))
        model = self.executor.holdings.config
        return room_for_messages(model, len(program.plan.stages), largest)

    def train(
        self,
        source: BatchSource,
        batch: GlobalBatch,
        step_size: StepSize,
        *,
        following: Plan,
        late: frozenset[tuple[int, int]] = frozenset(),
        signals: tuple[bool, ...] = (),
        count_zeros: bool = False,
    ) -> StepResult:
        """Train on ``batch`` and leave the layout ``following`` behind.

        ``late``: (slab, device) pairs without room for an early copy, handed over after the update.
        """
        way = self.config.flexpipe.flexpipe_switch
        change = None
        if not following.keeps(self.plan) and way != "restart":
            change = transition(
                self.plan,
                following,
                self.executor.holdings.config.layers,
                late=late if way == "live" else None,
                elements=self._footprint.elements,
            )
        within = None if way == "stall" else change
        result = self._run(source, batch, StepInputs(
            self._reader, batch.denominators, step_size, signals, count_zeros
        ), within)  # fmt: skip
        if change is not None:
            if way == "stall":
                self._stall(change)
            self.executor.holdings.adopt(following)
        if way != "restart":
            self.plan = following
        return result

    def evaluate(
        self, source: BatchSource, batch: GlobalBatch, signals: tuple[bool, ...] = ()
    ) -> StepResult:
        """Losses of ``batch``, without an update."""
        inputs = StepInputs(self._reader, batch.denominators, signals=signals)
        return self._run(source, batch, inputs, None)

    def _run(
        self,
        source: BatchSource,
        batch: GlobalBatch,
        inputs: StepInputs,
        change: Transition | None,
    ) -> StepResult:
        world, model = self.executor.world, self.executor.holdings.config
        micro_batches = cut(self.config, batch, self.coefficients)
        evaluate = inputs.step_size is None
        live = self.config.flexpipe.flexpipe_switch == "live"
        build = partial(
            build_program,
            model,
            self.plan,
            micro_batches,
            world.size,
            policy=self.config.flexpipe.flexpipe_schedule,
            forward_only=evaluate,
            switch=change,
        )
        program = build(moved=None if live else ())
        if program.held is not None and not self._fits(program, micro_batches):
            program = build(moved=())  # live migration takes memory on both sides
        if not evaluate:
            expected = Expected(*self._footprint.device(program, world.rank), self._budget)
            inputs = replace(inputs, memory=expected)
        key = (program.plan, program.next_plan, len(micro_batches), evaluate)
        if key not in self._validated:
            validate(program, model.layers, forward_only=evaluate)
            if len(self._validated) >= _REMEMBERED:
                self._validated.clear()
            self._validated.add(key)
        if world.reductions is not None and not evaluate:
            world.reductions.prepare(reduction_groups([program]))
        self.last = (program, micro_batches)
        self._reader.start(source, micro_batches, program, world.rank)
        return self.executor.run(program, inputs)

    def _fits(self, program: Program, micro_batches: Sequence[MicroBatch]) -> bool:
        if self._budget is None:
            return True
        allowed = allowance(self._budget, self._room(program, micro_batches))
        return max(self._footprint.peaks(program)) <= allowed

    def _stall(self, change: Transition) -> None:
        """Everybody stops, state moves, everybody goes on."""
        world = self.executor.world
        world.barrier()
        lists = switch_only(change, self.executor.holdings.config.layers, world.size)
        if world.reductions is not None:
            world.reductions.prepare(used_groups(lists))
        self.executor.switch(lists[world.rank])
        world.barrier()
