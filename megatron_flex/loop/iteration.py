"""One iteration from its place in the data to its result: batch, micro-batches, program, run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flex.config.config import Config
from megatron_flex.data.batches import BatchSource, GlobalBatch
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.data.microbatches import CostCoefficients, cut_by_count, cut_by_tokens
from megatron_flex.planner.flops import model_work, total_work
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.plan import Plan
from megatron_flex.programs import build_program
from megatron_flex.loop.reader import Reader
from megatron_flex.runtime.executor import Executor, StepInputs, StepResult, reduction_groups
from megatron_flex.runtime.optimizer import StepSize
from megatron_flex.schedule.validate import validate


def cost_coefficients(config: ModelConfig) -> CostCoefficients:
    """What a sample costs, for cutting micro-batches: FLOPs, normalised to 1 a token.

    Fixed for a run and kept in the checkpoint, so that a resumed run cuts alike.
    """
    work = total_work(model_work(config))
    return CostCoefficients(1.0, work.quadratic / work.linear)


@dataclass
class Iterations:
    """Runs iterations on one plan.

    ``validated`` holds the shapes of programs that the validator has seen: a plan's first program
    of each kind and number of micro-batches is replayed before it runs.
    """

    config: Config
    plan: Plan
    executor: Executor
    coefficients: CostCoefficients

    def __post_init__(self) -> None:
        self._reader = Reader(self.config.data.num_workers)
        self._validated: set[tuple[int, bool]] = set()

    def cut(self, batch: GlobalBatch) -> tuple[MicroBatch, ...]:
        """The micro-batches of a global batch, by the flags alone."""
        budget = self.config.data.micro_batch_tokens
        if budget is not None:
            return cut_by_tokens(batch, budget, self.coefficients)
        size = self.config.training.micro_batch_size
        assert size is not None, "arguments were checked"
        return cut_by_count(batch, size)

    def run(
        self,
        source: BatchSource,
        batch: GlobalBatch,
        *,
        step_size: StepSize | None = None,
        signals: tuple[bool, ...] = (),
        count_zeros: bool = False,
    ) -> StepResult:
        """Train on ``batch``, or evaluate it when there is no ``step_size``."""
        executor = self.executor
        world, model = executor.world, executor.holdings.config
        micro_batches = self.cut(batch)
        evaluate = step_size is None
        program = build_program(
            model,
            self.plan,
            micro_batches,
            world.size,
            policy=self.config.flexpipe.flexpipe_schedule,
            forward_only=evaluate,
        )
        shape = (len(micro_batches), evaluate)
        if shape not in self._validated:
            validate(program, model.layers, forward_only=evaluate)
            self._validated.add(shape)
            if world.reductions is not None:
                world.reductions.prepare(reduction_groups([program]))
        self._reader.start(source, micro_batches, program, world.rank)
        inputs = StepInputs(self._reader, batch.denominators, step_size, signals, count_zeros)
        return executor.run(program, inputs)
