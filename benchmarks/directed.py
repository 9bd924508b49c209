"""Iterations whose workers make their programs themselves: no planner's process is in the way."""

from __future__ import annotations

from megatron_flex.config.config import Config
from megatron_flex.data.batches import BatchSource
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.loop.assemble import Parts
from megatron_flex.loop.iteration import Iterations
from megatron_flex.loop.setup import planner_setup
from megatron_flex.planner.build import Batch
from megatron_flex.planner.flops import cost_coefficients
from megatron_flex.planner.messages import Task
from megatron_flex.planner.package import Received, unpack
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.service import Service
from megatron_flex.planner.switching import switch
from megatron_flex.runtime.executor import Executor, StepResult
from megatron_flex.runtime.optimizer import StepSize


class Directed:
    """Trains on plan after plan, as it is told."""

    def __init__(self, config: Config, parts: Parts, plan: Plan, executor: Executor) -> None:
        self._parts = parts
        self._coefficients = cost_coefficients(parts.model)
        self.iterations = Iterations(config, plan, executor, self._coefficients, parts.profile)
        self._services: dict[str, Service] = {}

    def switch_seconds(self, batch: GlobalBatch, following: Plan) -> float:
        """What the switch to ``following`` is simulated to take beside the iteration."""
        now, planner = self.iterations.plan, self.service.planner
        if following.keeps(now):
            return 0.0
        running = planner.running(now, Batch.of(self.iterations.cut(batch, now)))
        return switch(planner.units, running, following).seconds

    @property
    def service(self) -> Service:
        """Makes programs as the flags say now."""
        config, world = self.iterations.config, self.iterations.executor.world
        way = config.flexpipe.flexpipe_switch
        if way not in self._services:
            setup = planner_setup(config, self._parts, world.size, self._coefficients)
            self._services[way] = Service(setup)
        return self._services[way]

    def train(
        self, source: BatchSource, batch: GlobalBatch, step_size: StepSize, *, following: Plan
    ) -> StepResult:
        """Train on ``batch`` and leave the layout ``following`` behind."""
        told, parts = self.told(batch, following)
        return self.iterations.train(source, batch, step_size, told, parts, following=following)

    def told(self, batch: GlobalBatch, following: Plan) -> tuple[Received, tuple[MicroBatch, ...]]:
        """What this worker does to train on ``batch``, and the micro-batches."""
        iterations = self.iterations
        parts = iterations.cut(batch, iterations.plan)
        service = self.service
        moves = service.moves and not following.keeps(iterations.plan)
        task = Task(
            "benchmark",
            str(iterations.plan),
            tuple(batch.lengths.tolist()),
            str(following) if moves else "",
        )
        package = service.done(task).package
        assert package is not None
        rank = iterations.executor.world.rank
        return unpack(package.header, package.parts[rank], rank, task.name, parts), parts
