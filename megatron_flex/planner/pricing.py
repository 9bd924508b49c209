"""The price of a plan for one batch: seconds by the closed form, bytes, and its O_plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.cost import Group, PlanCost, in_flight, saving_steps
from megatron_flex.planner.decision import Predicted
from megatron_flex.planner.native_search import SearchProblem
from megatron_flex.planner.optimise import GroupOptimisation, o_plan, optimise
from megatron_flex.planner.plan import OPlan, Plan
from megatron_flex.planner.plans import groups_of
from megatron_flex.planner.simulation import Prediction, op_costs, predict
from megatron_flex.planner.switching import SwitchPrice
from megatron_flex.planner.tables import Tables, prefix
from megatron_flex.planner.wave import wave_seconds
from megatron_flex.schedule.list_scheduler import policy
from megatron_flex.schedule.placement import Problem
from megatron_flex.schedule.policies.one_f_one_b import ONE_F_ONE_B, warm_up
from megatron_flex.schedule.policies.policy import in_flight_cap, out_of_step
from megatron_flex.schedule.policies.straight import is_even_straight
from megatron_flex.schedule.routing import route


@dataclass(frozen=True)
class Price:
    """A plan with its O_plan for one batch.

    Attributes:
        plan: its ``o_plan`` is the one built here.
        seconds: the iteration by the closed form, memory optimisation included; infinite when the
            plan does not fit even with it.
        before_update: the part of it before the optimizer's update.
        exposed: the part of that in which no device computes: gradient reductions, the host.
        missing: bytes that the fullest device lacks before memory optimisation.
        shortfall: bytes that it still lacks with all that is allowed.
        parts: what each group does for its memory.
        device_bytes: peak on each device of the world.
    """

    plan: Plan
    seconds: float
    before_update: float
    exposed: float
    missing: float
    shortfall: float
    parts: tuple[GroupOptimisation, ...]
    device_bytes: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """Whether every device fits."""
        return math.isfinite(self.seconds)

    @property
    def swap(self) -> float:
        """Seconds of waiting for the host, which a simulation does not know."""
        return max((p.swap_seconds for p in self.parts), default=0.0)

    def predicted(
        self, change: SwitchPrice | None, simulated: Prediction | None = None
    ) -> Predicted:
        """As a decision reports it."""
        seconds, size = self.seconds, self.device_bytes
        swap = sum(p.swap_seconds for p in self.parts)
        if simulated is not None:
            # The schedule knows recompute; the wait for the host comes on top.
            seconds = simulated.seconds + self.swap
            size = simulated.device_bytes
        return Predicted(
            seconds=seconds,
            switch_seconds=0.0 if change is None else change.seconds,
            recompute_seconds=sum(p.recompute_seconds for p in self.parts),
            swap_seconds=swap,
            device_bytes=size,
            recomputed_bytes=sum(p.recomputed for p in self.parts),
            offloaded_bytes=sum(p.offloaded for p in self.parts),
            simulated=simulated is not None,
        )


class Pricer:
    """Prices plans for one way of cutting one batch; ``costs`` must be of single units."""

    def __init__(self, costs: ModelCosts, batch: Batch) -> None:
        if costs.num_elements != costs.layers.num_units:
            raise ValueError("plans are priced by unit: give the costs of single units")
        self.costs = costs
        self.batch = batch
        self._known: dict[tuple[object, ...], Price] = {}

    @cached_property
    def problem(self) -> SearchProblem:
        """The tables of the batch, without a current plan, for groups of the searched sizes."""
        return SearchProblem(self.costs.tables(self.batch, None, self.costs.granule))

    @cached_property
    def _any_size(self) -> SearchProblem:
        return SearchProblem(self.costs.tables(self.batch))

    def problem_of(self, plan: Plan) -> SearchProblem:
        """The tables that know the plan's degrees."""
        granule = self.costs.granule
        return self._any_size if any(d % granule for d in plan.degrees) else self.problem

    def price(self, plan: Plan) -> Price:
        """The price of a plan's layout; its own O_plan is replaced by the cheapest that fits."""
        if plan.stages not in self._known:
            self._known[plan.stages] = self._price(plan)
        return self._known[plan.stages]

    def bound(self, plan: Plan) -> float:
        """Seconds that the price is not below: quick where memory is short."""
        problem = self.problem_of(plan)
        return problem.price(groups_of(problem.tables, plan)).seconds

    def simulate(self, price: Price, stop: float = math.inf) -> Prediction | None:
        """The schedule's own simulation of a priced plan, with its O_plan."""
        return predict(self.costs, price.plan, self.batch, stop=stop)

    def refined(self, price: Price) -> float:
        """A nearer estimate than the closed form, where the backward is fused (:mod:`wave`).

        The closed form itself with a split backward, and where devices hold several stages.
        """
        plan = price.plan
        if self.costs.options.split or len(plan.devices) < sum(plan.degrees):
            return price.seconds
        op = op_costs(self.costs, plan, self.batch)
        problem = Problem(plan, op, route(plan, op))
        forwards_first = policy(self.costs.options.schedule).forwards_first
        ahead = (op.num_micro_batches,) * op.num_stages if forwards_first else warm_up(problem)
        update = price.seconds - price.before_update
        wave = wave_seconds(op, problem.route, ahead, is_even_straight(plan))
        return wave + price.exposed + update

    def _price(self, plan: Plan) -> Price:
        problem = self.problem_of(plan)
        tables = problem.tables
        groups = groups_of(tables, plan)
        cost = problem.price(groups)
        budget = self.costs.budget
        ahead = self._ahead(plan, groups)
        lean = any(
            more and c.bytes + more > budget for c, more in zip(cost.groups, ahead, strict=True)
        )
        if not lean and any(ahead):
            more = (replace(c, bytes=c.bytes + a) for c, a in zip(cost.groups, ahead, strict=True))
            cost = replace(cost, groups=tuple(more))
        missing = max(c.missing for c in cost.groups)
        if missing <= 0:
            parts = (GroupOptimisation(),) * len(groups)
        else:
            parts = tuple(
                optimise(tables, g, c.missing) if c.missing > 0 else GroupOptimisation()
                for g, c in zip(groups, cost.groups, strict=True)
            )
        price = self.assembled(problem, plan, parts, missing, cost)
        optimisation = replace(o_plan(tables, parts) if price.fits else OPlan(), lean=lean)
        return replace(
            price,
            plan=self.costs.placed(Plan(plan.stages, optimisation)),
            shortfall=0.0 if price.fits else self._shortfall(plan),
        )

    def assembled(
        self,
        problem: SearchProblem,
        plan: Plan,
        parts: tuple[GroupOptimisation, ...],
        missing: float,
        cost: PlanCost,
    ) -> Price:
        """The price of ``plan``, which costs ``cost`` before its groups do what ``parts`` say.

        ``missing``: bytes that the fullest device lacks without it.
        """
        groups = groups_of(problem.tables, plan)
        before_update = _before_update(cost, parts)
        return Price(
            plan,
            before_update + max(c.update for c in cost.groups),
            before_update,
            _exposed(problem.tables, groups, cost, parts),
            missing,
            0.0,
            parts,
            self._device_bytes(groups, cost, parts),
        )

    def _ahead(self, plan: Plan, groups: Sequence[Group]) -> list[float]:
        """Bytes on each device of a group of the forwards in flight that a lean plan leaves out."""
        if self.costs.options.schedule != ONE_F_ONE_B.name:
            return [0.0] * len(groups)
        tables, degrees = self.problem_of(plan).tables, plan.degrees
        stage = {s.start: number for number, s in enumerate(plan.stages)}
        found = []
        for group in groups:
            size = 0.0
            for begin, end in group.chunks:
                number = stage[begin]
                late, degree = out_of_step(degrees, number), degrees[number]
                if late:
                    cap = in_flight_cap(tables.remaining[begin], tables.num_devices, degree, late)
                    tokens = tables.shares.top_tokens(degree, cap)
                    tokens -= tables.shares.top_tokens(degree, in_flight(tables, begin, degree))
                    size += tokens * float(tables.activation[begin:end].sum())
            found.append(size)
        return found

    def _device_bytes(
        self, groups: tuple[Group, ...], cost: PlanCost, parts: tuple[GroupOptimisation, ...]
    ) -> tuple[float, ...]:
        size = [0.0] * self.costs.cluster.world_size
        for group, terms, part in zip(groups, cost.groups, parts, strict=True):
            for device in group.devices:
                size[device] = terms.bytes - part.recomputed - part.offloaded
        return tuple(size)

    def _shortfall(self, plan: Plan) -> float:
        """Bytes that the fullest group lacks after all that memory optimisation can save."""
        problem = self.problem_of(plan)
        tables = problem.tables
        groups = groups_of(tables, plan)
        worst = 0.0
        for group, terms in zip(groups, problem.price(groups).groups, strict=True):
            saved = sum(
                size
                for number, (begin, end) in enumerate(group.chunks)
                for element in range(begin, end)
                for size, _ in saving_steps(tables, begin, element, len(group.of_chunk(number)))
                if size > 0
            )
            worst = max(worst, terms.missing - saved)
        return worst


def _before_update(cost: PlanCost, parts: tuple[GroupOptimisation, ...]) -> float:
    """The iteration with whole elements optimised, instead of the searches' relaxation."""
    worst = max(
        c.wait + c.work + c.tail + part.seconds for c, part in zip(cost.groups, parts, strict=True)
    )
    return max(worst, cost.chain)


def _exposed(
    t: Tables, groups: Sequence[Group], cost: PlanCost, parts: tuple[GroupOptimisation, ...]
) -> float:
    """Seconds that gradient reductions and the host add to computing, in the slowest group."""
    drained = np.zeros(t.num_elements + 1) if t.split else prefix(t.first_backward)
    return max(
        c.tail - float(drained[g.chunks[0][0]]) + part.swap_seconds
        for g, c, part in zip(groups, cost.groups, parts, strict=True)
    )
