"""What the workers do next: plans and programs, from the first worker to all.

At the beginning of an iteration the first worker has its program, which ends in the plan of the
iteration after it, and sends each worker its own part. All of it was made while others ran.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_flex.config.config import Config
from megatron_flex.data.batches import BatchSource
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.loop.assemble import Parts
from megatron_flex.loop.desk import Desk
from megatron_flex.loop.lengths import Lengths
from megatron_flex.loop.open_plans import open_plans
from megatron_flex.loop.planned import task_name
from megatron_flex.loop.plans import Choice, Plans
from megatron_flex.loop.setup import planner_setup
from megatron_flex.planner.messages import Task
from megatron_flex.planner.package import Package, Received, unpack
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.runtime.world import World

AHEAD = 2
"""Programs that are made ahead where plans are settled."""


class Steps:
    """One run's plans and programs; every method is collective.

    Attributes:
        choice: the plan of the iteration that runs next.
        read: seconds that it took to receive and read this worker's part of the last program.
    """

    def __init__(
        self,
        config: Config,
        parts: Parts,
        world: World,
        iteration: int,
        samples: int,
        coefficients: CostCoefficients,
    ) -> None:
        """From ``iteration`` on, which starts after ``samples`` samples."""
        self._world = world
        self._leader: _Leader | None = None
        self.read = 0.0
        if world.process == 0:
            self._leader = _Leader(config, parts, world.size, iteration, samples, coefficients)
        self.choice = self._first(iteration)

    def _first(self, iteration: int) -> Choice:
        def say(leader: _Leader) -> tuple[dict[str, Any], Package | None]:
            return {"choice": leader.plans.at(iteration).to_json()}, None

        data, _ = self._tell(say)
        return Choice.from_json(data["choice"])

    def next(
        self, iteration: int, micro_batches: Sequence[MicroBatch], *, last: bool
    ) -> tuple[Received, Choice]:
        """What this worker does in ``iteration``, and the plan that it leads to.

        Args:
            micro_batches: as this worker has cut its batch.
            last: no iteration follows.

        Raises:
            PlanError: no plan fits the next batch, or a program is refused.
            StampError: this worker is somewhere else than the first one.
        """

        def say(leader: _Leader) -> tuple[dict[str, Any], Package | None]:
            following, package = leader.step(iteration, self.choice, last=last)
            return {"choice": following.to_json()}, package

        data, part = self._tell(say)
        told = self._read(data, part, task_name(iteration), micro_batches)
        self.choice = Choice.from_json(data["choice"])
        return told, self.choice

    def evaluation(
        self,
        plan: Plan,
        source: BatchSource,
        first: int,
        size: int,
        micro_batches: Sequence[MicroBatch],
    ) -> Received:
        """What this worker does to evaluate ``size`` samples from ``first`` on."""
        name = f"evaluate {first}"

        def say(leader: _Leader) -> tuple[dict[str, Any], Package | None]:
            return {}, leader.evaluation(name, plan, source, first, size)

        data, part = self._tell(say)
        return self._read(data, part, name, micro_batches)

    def measured(self, iteration: int, seconds: float, memory: float) -> None:
        """What an iteration took, and the largest ratio of measured to predicted memory."""
        if self._leader is not None:
            self._leader.plans.measured(iteration, seconds, memory)

    def close(self) -> None:
        """End the planner's process."""
        if self._leader is not None:
            self._leader.desk.close()

    # ---- from the first worker to all -------------------------------------------------------

    def _tell(
        self, say: Callable[[_Leader], tuple[dict[str, Any], Package | None]]
    ) -> tuple[dict[str, Any], bytes]:
        """What the first worker says to all, and this worker's part of a package."""
        messages = None
        if self._leader is not None:
            try:
                data, package = say(self._leader)
            except PlanError as error:
                data, package = {"problem": str(error)}, None
            if package is not None:
                data = {**data, "header": package.header}
            head = json.dumps(data).encode() + b"\n"
            parts = (b"",) * self._world.size if package is None else package.parts
            messages = [head + part for part in parts]
        message, self.read = self._world.deliver(messages)
        head, _, part = message.partition(b"\n")
        told: dict[str, Any] = json.loads(head)
        if "problem" in told:
            raise PlanError(told["problem"])
        return told, part

    def _read(
        self, data: dict[str, Any], part: bytes, name: str, micro_batches: Sequence[MicroBatch]
    ) -> Received:
        began = time.perf_counter()
        found = unpack(data["header"], part, self._world.rank, name, micro_batches)
        self.read += time.perf_counter() - began
        return found


class _Leader:
    """What only the first worker knows."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        world_size: int,
        iteration: int,
        samples: int,
        coefficients: CostCoefficients,
    ) -> None:
        self.desk = Desk(planner_setup(config, parts, world_size, coefficients))
        self._moves = config.flexpipe.flexpipe_switch in ("live", "handover")
        self.lengths: Lengths | None = None
        if parts.train is not None:
            sizes = config.training.batch_sizes.size
            self.lengths = Lengths(parts.train, iteration, samples, sizes)
        self.plans: Plans = open_plans(config, parts, self.desk, self.lengths, iteration)

    def step(self, iteration: int, current: Choice, *, last: bool) -> tuple[Choice, Package]:
        """The plan after ``iteration``, and the program that leads to it."""
        following = current if last else self.plans.at(iteration + 1)
        task = self._task(iteration, current, following)
        patient = self.plans.ahead(iteration + 1) is not None
        package = self.desk.package(task, patient=patient)
        for later in range(iteration + 1, iteration + 1 + AHEAD):
            before, after = self.plans.ahead(later), self.plans.ahead(later + 1)
            if before is not None and after is not None:
                self.desk.expect(self._task(later, before, after))
        return following, package

    def _task(self, iteration: int, current: Choice, following: Choice) -> Task:
        assert self.lengths is not None, "training needs data"
        moves = self._moves and not following.plan.keeps(current.plan)
        return Task(
            task_name(iteration),
            str(current.plan),
            self.lengths.of(iteration),
            str(following.plan) if moves else "",
            tuple(sorted(following.late)) if moves else (),
        )

    def evaluation(
        self, name: str, plan: Plan, source: BatchSource, first: int, size: int
    ) -> Package:
        """The program of an evaluation; that of the batch after it is asked for."""

        def task(name: str, first: int) -> Task:
            lengths = tuple(source.batch(first, size).lengths.tolist())
            return Task(name, str(plan), lengths, forward_only=True)

        wanted = task(name, first)
        self.desk.expect(wanted)
        assert source.num_samples is not None, "an evaluation needs a source that ends"
        if first + size < source.num_samples:
            self.desk.expect(task(f"evaluate {first + size}", first + size))
        return self.desk.package(wanted, patient=True)
