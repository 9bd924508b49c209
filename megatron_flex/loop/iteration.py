"""One iteration from its batch and its part of the program to its result."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flex.cluster.profile import Profile
from megatron_flex.config.config import Config
from megatron_flex.data.batches import BatchSource
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.loop.cutting import run_cut
from megatron_flex.loop.reader import Reader
from megatron_flex.planner.memory import slab_elements
from megatron_flex.planner.package import Received
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.tensor import TensorParallel
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.memory import Expected
from megatron_flex.runtime.optimizer import StepSize
from megatron_flex.runtime.step import StepInputs, StepResult
from megatron_flex.runtime.world import server_size
from megatron_flex.schedule.compact import groups_of
from megatron_flex.schedule.emit import switch_only
from megatron_flex.schedule.transition import transition


def tensor_of(config: Config) -> TensorParallel:
    """How a run's workers share layers."""
    p = config.parallel
    return TensorParallel(p.tensor_model_parallel_size, p.sequence_parallel)


@dataclass
class Iterations:
    """Runs iterations; ``plan`` is the layout that the devices are in.

    ``last``: what this worker was told to do last, and the micro-batches.
    """

    config: Config
    plan: Plan
    executor: Executor
    coefficients: CostCoefficients
    profile: Profile | None

    def __post_init__(self) -> None:
        self.last: tuple[Received, tuple[MicroBatch, ...]] | None = None
        model = self.executor.holdings.config
        self._cut = run_cut(self.config, self.coefficients, model, self.profile)
        self._reader = Reader(self.config.data.num_workers)
        self._budget = self.config.flexpipe.memory_budget

    def cut(self, batch: GlobalBatch, plan: Plan) -> tuple[MicroBatch, ...]:
        """The micro-batches of a global batch that ``plan`` is for."""
        return self._cut.micro_batches(batch, plan.cut)

    def train(
        self,
        source: BatchSource,
        batch: GlobalBatch,
        step_size: StepSize,
        told: Received,
        micro_batches: tuple[MicroBatch, ...],
        *,
        following: Plan,
        signals: tuple[bool, ...] = (),
        count_zeros: bool = False,
        read: float = 0.0,
    ) -> StepResult:
        """Train on ``batch`` as this worker is told, and leave the layout ``following`` behind.

        ``read``: seconds that it took to receive and read ``told``.
        """
        way = self.config.flexpipe.flexpipe_switch
        inputs = StepInputs(
            self._reader,
            batch.denominators,
            step_size,
            signals,
            count_zeros,
            Expected(*told.memory, self._budget),
            read,
        )
        result = self._run(source, told, micro_batches, inputs)
        if not following.keeps(self.plan) and way != "restart":
            if way == "stall":
                self._stall(following)
            self.executor.holdings.adopt(following)
        if way != "restart":
            self.plan = following
        return result

    def evaluate(
        self,
        source: BatchSource,
        batch: GlobalBatch,
        told: Received,
        micro_batches: tuple[MicroBatch, ...],
        signals: tuple[bool, ...] = (),
    ) -> StepResult:
        """Losses of ``batch``, without an update."""
        inputs = StepInputs(self._reader, batch.denominators, signals=signals)
        return self._run(source, told, micro_batches, inputs)

    def _run(
        self,
        source: BatchSource,
        told: Received,
        micro_batches: tuple[MicroBatch, ...],
        inputs: StepInputs,
    ) -> StepResult:
        world = self.executor.world
        if world.reductions is not None and inputs.step_size is not None:
            world.reductions.prepare(set(told.part.groups))
        self.last = (told, micro_batches)
        self._reader.start(source, micro_batches, told.part)
        return self.executor.run(told.part, inputs)

    def _stall(self, following: Plan) -> None:
        """Everybody stops, state moves, everybody goes on."""
        world, model = self.executor.world, self.executor.holdings.config
        elements = slab_elements(model, tensor_of(self.config))
        change = transition(
            self.plan,
            following,
            model.layers,
            sizes=elements,
            late=None,
            server_size=server_size(world.size, world.tensor.size),
            elements=elements,
        )
        world.barrier()
        lists = switch_only(change, model.layers, world.size)
        if world.reductions is not None:
            world.reductions.prepare(set(groups_of(lists)))
        self.executor.switch(lists[world.rank])
        world.barrier()
