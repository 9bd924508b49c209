"""Makes programs: from a plan and a batch to checked instruction lists, their time and memory."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeVar

from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.footprint import Footprint
from megatron_flex.planner.limits import allowance
from megatron_flex.planner.options import AUTO
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.simulation import (
    FUSED,
    SEARCHED,
    Placed,
    Prediction,
    op_costs,
    place_plan,
    schedule_of,
)
from megatron_flex.schedule.instructions import Program
from megatron_flex.schedule.list_scheduler import finish
from megatron_flex.schedule.migration import migrate
from megatron_flex.schedule.routing import route
from megatron_flex.schedule.timeline import Timeline
from megatron_flex.schedule.transition import Transition
from megatron_flex.schedule.validate import validate

MIGRATION_GAIN = 0.05
"""Micro-batches move to the next layout within an iteration if its simulated time falls by this."""
_REMEMBERED = 8
_ATTEMPTS = 3
_Made = TypeVar("_Made", "Made", "Made | None")


@dataclass(frozen=True)
class Made:
    """A program, and what it is predicted to take.

    Attributes:
        program: accepted by the validator.
        schedule: the policy that ordered it.
        spare: bytes of the whole budget in which it was to place no activations.
        timeline: every operation, reduction and update with its time.
        memory: for each device of the world, peak bytes up to the global norm, and after it.
    """

    program: Program
    schedule: str
    spare: int
    timeline: Timeline
    memory: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        """The whole iteration."""
        return self.timeline.makespan

    @property
    def prediction(self) -> Prediction:
        """As decisions compare it."""
        return Prediction(self.seconds, self.peaks, self.timeline, self.schedule, self.spare)

    @property
    def peaks(self) -> tuple[float, ...]:
        """Bytes of every device of the world."""
        return tuple(map(max, self.memory))

    @property
    def peak(self) -> float:
        """Bytes of the fullest device."""
        return max(self.peaks)


class Maker:
    """Makes the programs of one model on one cluster; ``costs`` must be of single units."""

    def __init__(self, costs: ModelCosts) -> None:
        self.costs = costs
        self.footprint = Footprint(
            costs.config,
            exact=costs.options.bitwise,
            tensor=costs.options.tensor,
            divided=costs.divided,
        )
        self._made: OrderedDict[tuple[object, ...], Made] = OrderedDict()

    @property
    def allowed(self) -> float:
        """Bytes that the predicted peak of a device may have."""
        return allowance(float(self.costs.budget))

    def keep(self, plan: Plan, batch: Batch, *, forward_only: bool = False) -> Made:
        """The program of an iteration (or an evaluation) that leaves the plan as it is.

        Of a plan that names no schedule where :data:`AUTO` is asked for: that with a split
        backward, or with a fused one where memory is short and that fits or is faster.
        """
        key = (str(plan), *batch.key, forward_only)
        return self._remembered(key, lambda: self._keep(plan, batch, forward_only))

    def under(self, plan: Plan, batch: Batch, schedule: str) -> Made:
        """The program of a plan under a schedule, by which it leaves free what it takes to fit."""
        found = self.under_within(plan, batch, schedule, math.inf)
        assert found is not None
        return found

    def under_within(self, plan: Plan, batch: Batch, schedule: str, stop: float) -> Made | None:
        """The same; ``None`` where its operations are sure to take ``stop`` seconds or more."""
        key = (schedule, str(plan), *batch.key)
        return self._remembered(key, lambda: self._under(plan, batch, schedule, stop))

    def _remembered(self, key: tuple[object, ...], make: Callable[[], _Made]) -> Made | _Made:
        known = self._made.get(key)
        if known is None:
            made = make()
            if made is None:
                return made
            known = self._made[key] = made
            if len(self._made) > _REMEMBERED:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return known

    def _keep(self, plan: Plan, batch: Batch, forward_only: bool) -> Made:
        if plan.schedule or forward_only:  # it has been decided, with what it leaves free
            placed = place_plan(
                self.costs, plan, batch, spare=plan.spare, forward_only=forward_only
            )
            assert placed is not None  # only a finite stop gives None
            return self._finish(placed, batch, None, plan.spare)
        schedule = schedule_of(plan, self.costs.options)
        if schedule != AUTO:
            return self.under(plan, batch, schedule)
        # Split backwards hold more, so that a fused one may do where a split one does not fit, or
        # only with so little in flight that halves do not pay.
        split, allowed = self.under(plan, batch, SEARCHED), self.allowed
        if split.peak <= allowed and not (plan.o_plan.saves or split.spare > self._spare):
            return split
        fused = self.under(plan, batch, FUSED)
        return min(split, fused, key=lambda made: (made.peak > allowed, made.seconds))

    @property
    def _spare(self) -> int:
        """Bytes that are left free because memory was predicted too low."""
        return math.ceil(self.costs.whole_budget - self.costs.budget)

    def _under(self, plan: Plan, batch: Batch, schedule: str, stop: float) -> Made | None:
        if self.costs.options.schedule == AUTO:
            plan = replace(plan, schedule=schedule)
        spare = self._spare
        for attempt in range(_ATTEMPTS):
            placed = place_plan(self.costs, plan, batch, spare=spare, stop=stop)
            if placed is None or placed.placement.makespan >= stop:
                return None
            made = self._finish(placed, batch, None, spare)
            over = made.peak - self.allowed
            # Activations are placed within a bound; where the program takes more, into less. What
            # was decided stays, so that it is the same wherever it is made again.
            if over <= 0 or not made.timeline.placement.problem.split:
                break
            spare += math.ceil(over) * (1 + attempt)
        return made

    def switch(
        self,
        plan: Plan,
        batch: Batch,
        change: Transition,
        *,
        moved: Collection[int] | None = None,
    ) -> Made:
        """The program of an iteration that ends in another plan.

        Args:
            moved: micro-batches that run by the next plan already (live migration); ``None`` moves
                some where that gains time and fits.
        """
        kept = self.keep(plan, batch)
        placed = Placed(kept.schedule, kept.timeline.placement)
        if moved is not None:
            migrated = self._migrated(kept, batch, change, moved) if moved else placed
            assert migrated is not None  # only a finite stop gives None
            return self._finish(migrated, batch, change, kept.spare)
        made = self._finish(placed, batch, change, kept.spare)
        best = placed.placement.makespan * (1.0 - MIGRATION_GAIN)
        for some in filter(None, _some_to_move(batch)):
            found = self._migrated(kept, batch, change, some, best)
            if found is None or found.placement.makespan >= best:
                continue
            trial = self._finish(found, batch, change, kept.spare)
            if trial.peak <= self.allowed:  # both sides take memory
                best, made = found.placement.makespan, trial
        return made

    def _migrated(
        self,
        kept: Made,
        batch: Batch,
        change: Transition,
        moved: Collection[int],
        stop: float = math.inf,
    ) -> Placed | None:
        """The placement in which ``moved`` micro-batches run by the next plan where they can."""
        costs = self.costs
        next_costs = op_costs(costs, change.next_plan, batch)
        new_table = route(change.next_plan, next_costs, batch.chains)
        old_table = kept.program.route
        migration = migrate(change, old_table, new_table, moved, costs.layers)
        plan = replace(migration.plan, schedule=kept.schedule, spare=kept.spare)
        return place_plan(costs, plan, batch, table=migration.route, stop=stop)

    def _finish(self, placed: Placed, batch: Batch, change: Transition | None, spare: int) -> Made:
        costs = self.costs
        forward_only = placed.placement.problem.forward_only
        schedule = finish(
            placed.placement,
            costs.layers,
            [int(t) for t in batch.tokens],
            world_size=costs.cluster.world_size,
            name=placed.schedule,
            switch=change,
        )
        program = schedule.program
        validate(program, costs.layers, forward_only=forward_only)
        memory = self.footprint.devices(program, [int(n) for n in batch.sliced])
        return Made(program, placed.schedule, spare, schedule.timeline, memory)


def _some_to_move(batch: Batch) -> list[tuple[int, ...]]:
    """Sets of micro-batches that may move: every second one, soon and in the second half.

    Every second, so that old and new holders compute side by side; not the first ones, whose turn
    comes before the weights have arrived. Chains move whole.
    """
    chains = {chain[0]: chain for chain in batch.chains}
    later = {m for chain in batch.chains for m in chain[1:]}
    alone = [m for m in range(len(batch.tokens)) if m not in later]
    sets = (alone[2::2], alone[len(alone) // 2 :: 2])
    return [tuple(m for first in some for m in chains.get(first, (first,))) for some in sets]
