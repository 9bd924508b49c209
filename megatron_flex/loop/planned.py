"""``--flexpipe``: a planner chooses the plan of every iteration while others are running.

Rank 0 asks for iteration k+2 when the plan of k+1 is settled, and tells the others at the boundary.
A planner that is late or gone never stops training: the plan stays where the batch fits it, and
rank 0 decides where it does not.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from megatron_flex.cluster.cluster import Cluster, description, load
from megatron_flex.cluster.profile import Profile
from megatron_flex.config.config import Config
from megatron_flex.data.batches import BatchSource
from megatron_flex.loop.assemble import Parts
from megatron_flex.loop.iteration import cost_coefficients
from megatron_flex.loop.planner_process import PlannerGoneError, PlannerProcess
from megatron_flex.loop.plans import Choice
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.service import REMEMBERED, Answer, Cut, Question, Service, Setup
from megatron_flex.runtime.world import World

STARTUP = 120.0
"""Seconds that the first decisions may take: the process starts, and nothing trains meanwhile."""
PATIENCE = 0.05
"""Seconds to wait for a decision at an iteration's boundary before the plan stays."""
UNANSWERED = 2
"""A planner that owes so many answers is asked nothing more: it would fall further behind."""


def planner_setup(config: Config, parts: Parts, world_size: int) -> Setup:
    """What the planner needs to know of a run. Raises ``ValueError`` naming the flag."""
    f = config.flexpipe
    if f.flexpipe_cluster is None and torch.cuda.is_available():
        raise ValueError("--flexpipe on GPUs needs --flexpipe-cluster, such as a100 or h200, or a"
                         " file that describes the devices and links")  # fmt: skip
    cluster = load(f.flexpipe_cluster or f"cpux{min(4, world_size)}")
    per_server = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    cluster = _sized(cluster, world_size, per_server)
    options = PlannerOptions(
        planner=f.flexpipe_planner,
        unit=f.flexpipe_unit,
        schedule=f.flexpipe_schedule,
        lookahead=f.flexpipe_lookahead,
        budget=f.memory_budget,
        exact_memory=True,
        bitwise=f.flexpipe_bitwise,
        shard_optimizer=config.parallel.use_distributed_optimizer,
        # Tried on CPU workers only; on GPUs a plan may still ask for it.
        offload_optimizer=not torch.cuda.is_available(),
        offload_activations=not torch.cuda.is_available(),
    )
    path = f.flexpipe_profile
    coefficients = cost_coefficients(parts.model)
    cut = Cut(
        config.data.micro_batch_tokens,
        config.training.micro_batch_size,
        coefficients.linear,
        coefficients.quadratic,
    )
    profile = None if path is None else Profile.load(Path(path)).to_json()
    return Setup(parts.model, description(cluster), profile, options, cut, str(parts.plan))


def _sized(cluster: Cluster, world_size: int, per_server: int) -> Cluster:
    """The cluster with the job's own numbers of servers and devices."""
    servers = -(-world_size // per_server)
    return replace(cluster, servers=servers, devices_per_server=per_server)


class PlannedPlans:
    """Plans from a planner's process."""

    change = True

    def __init__(
        self, config: Config, parts: Parts, world: World, iteration: int, samples: int
    ) -> None:
        """Plans from ``iteration`` on, which starts after ``samples`` samples."""
        assert parts.train is not None, "a planner needs training data"
        self._world = world
        self._source: BatchSource = parts.train
        self._size: Callable[[int], int] = config.training.batch_sizes.size
        self._first = iteration
        self._starts = [samples]  # samples before each iteration from the first on
        self._window = config.flexpipe.flexpipe_lookahead
        self._choice = Choice(parts.plan, reason="static")
        self._predicted: dict[int, float] = {}
        self._measured: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._memory: deque[float] = deque(maxlen=REMEMBERED)
        self._missed = 0
        self._process: PlannerProcess | None = None
        self._setup: Setup | None = None
        if world.rank == 0:
            self._setup = planner_setup(config, parts, world.size)
            self._process = PlannerProcess(self._setup)

    def at(self, iteration: int) -> Choice:
        """The plan of ``iteration``; collective, see :class:`megatron_flex.loop.plans.Plans`."""
        text = self._world.broadcast(self._decide(iteration) if self._world.rank == 0 else None)
        told = json.loads(str(text))
        if told["problem"]:
            raise PlanError(told["problem"])
        self._choice = Choice(
            Plan.parse(told["plan"]),
            told["action"],
            told["reason"],
            told["seconds"],
            frozenset((slab, device) for slab, device in told["late"]),
            told["uncorrected"],
        )
        if self._world.rank == 0:
            self._ask(iteration + 1)
        return self._choice

    def measured(self, iteration: int, seconds: float, memory: float) -> None:
        """Correct the planner's predictions."""
        predicted = self._predicted.pop(iteration, None)
        if predicted is not None:
            self._measured.append((predicted, seconds))
        if memory > 0.0:
            self._memory.append(memory)

    def close(self) -> None:
        """End the planner's process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    # ---- rank 0 ------------------------------------------------------------------------------

    def _decide(self, iteration: int) -> str:
        if iteration == self._first:
            self._ask(iteration, running=False)
        startup = iteration <= self._first + 1
        answer = self._take(iteration, STARTUP if startup else PATIENCE)
        return self._keep(iteration) if answer is None else self._decided(answer)

    def _decided(self, answer: Answer) -> str:
        """What an answer means, for all workers."""
        decision, iteration = answer.decision, answer.iteration
        if decision is None:
            return _told(self._choice, problem=answer.problem)
        self._predicted[iteration] = uncorrected = decision.predicted.seconds
        reason = "; ".join(
            f"{r.condition}: {r.text} ({r.sides}: {'yes' if r.holds else 'no'})"
            for r in decision.reasons
        )
        return _told(
            Choice(
                decision.plan,
                decision.action.symbol,
                reason,
                uncorrected * answer.factor,
                frozenset(answer.late),
                uncorrected,
            )
        )

    def _keep(self, iteration: int) -> str:
        """The layout before stays, with what this batch needs for its memory, if it fits.

        If not, this worker decides in the planner's place while the others wait: training goes on.
        """
        assert self._setup is not None
        service = self._deputy
        finder = service.planner.finder([self._setup.cut.batch(self._lengths(iteration))])
        current = finder.best_of(self._choice.plan, None, "current")
        candidate = service.planner.fitted(finder, current)
        if candidate.price.fits:
            return _told(Choice(candidate.plan, reason="kept: no decision"))
        answer = service.answer(self._question(iteration, running=iteration > self._first))
        if answer.decision is not None:
            return self._decided(answer)
        return _told(
            self._choice,
            problem=f"the planner gave no plan for iteration {iteration + 1}, and its batch does"
            f" not fit the plan before it ({self._choice.plan}): {answer.problem}",
        )

    @cached_property
    def _deputy(self) -> Service:
        """The planner's work in this process, once it is needed."""
        assert self._setup is not None
        return Service(self._setup)

    def _take(self, iteration: int, timeout: float) -> Answer | None:
        """The answer for ``iteration``, if it is there; older ones are passed over."""
        if self._process is None:
            self._missed += 1
            return None
        try:
            while True:
                answer = self._process.take(timeout)
                if answer is None:
                    self._missed += 1
                    self._warn(f"the planner is late for iteration {iteration + 1}")
                    return None
                if answer.iteration == iteration:
                    return answer
        except PlannerGoneError as error:
            self._missed += 1
            self._warn(str(error))
            self._process = None
            return None

    def _ask(self, iteration: int, *, running: bool = True) -> None:
        if self._process is None or self._process.unanswered >= UNANSWERED:
            return
        question = self._question(iteration, running=running)
        self._measured.clear()
        self._memory.clear()
        self._process.ask(question)

    def _question(self, iteration: int, *, running: bool) -> Question:
        window = tuple(self._lengths(iteration + i) for i in range(self._window))
        return Question(
            iteration,
            tuple(w for w in window if w),
            str(self._choice.plan) if running else None,
            self._lengths(iteration - 1) if running else (),
            tuple(self._measured),
            tuple(self._memory),
        )

    def _lengths(self, iteration: int) -> tuple[int, ...]:
        """Sample lengths of an iteration's batch, from the index."""
        starts = self._starts
        while len(starts) <= iteration - self._first:
            starts.append(starts[-1] + self._size(starts[-1]))
        first = starts[iteration - self._first]
        batch = self._source.batch(first, self._size(first))
        return tuple(batch.lengths.tolist())

    def _warn(self, what: str) -> None:
        missed = f"{self._missed} decisions missed so far"
        text = (
            f"warning: {what}; the plan {self._choice.plan} stays if the batch fits it ({missed})"
        )
        print(text, file=sys.stderr, flush=True)


def _told(choice: Choice, problem: str = "") -> str:
    return json.dumps(
        {
            "plan": str(choice.plan),
            "action": choice.action,
            "reason": choice.reason,
            "seconds": choice.seconds,
            "late": sorted(choice.late),
            "uncorrected": choice.uncorrected,
            "problem": problem,
        }
    )
