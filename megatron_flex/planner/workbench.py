"""What all of the planner works with: costs, programs, what fits, and the plans of even layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from megatron_flex.cluster.cluster import Cluster
from megatron_flex.cluster.profile import Profile
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.candidates import Candidate, Finder
from megatron_flex.planner.closed_form import LONGEST
from megatron_flex.planner.fit import Fitter
from megatron_flex.planner.limits import allowance
from megatron_flex.planner.maker import Maker
from megatron_flex.planner.options import AUTO, PlannerOptions
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.pricing import Price
from megatron_flex.planner.simulation import Placed, Prediction, predict, prediction_of
from megatron_flex.planner.static import static_plan
from megatron_flex.planner.switching import LiveSwitches, Running
from megatron_flex.planner.tensor import check_profile
from megatron_flex.schedule.list_scheduler import policy

REMEMBERED = 4
"""Latest predictions that are kept: what was decided on is asked for again."""


class Workbench:
    """For one model on one cluster.

    Args:
        config: the model.
        profile: what its units cost on the cluster's devices.
        cluster: devices and links.
        options: what the user chose.
    """

    def __init__(
        self, config: ModelConfig, profile: Profile, cluster: Cluster, options: PlannerOptions
    ) -> None:
        profile.check_model(config)
        check_profile(profile, options.tensor)
        self._warned = False  # once is enough
        self.options = options
        self.elements = self.units = ModelCosts(config, profile, cluster, options)
        if options.unit != "block":
            self.units = replace(self.elements, options=replace(options, unit="block"))
        self.maker = Maker(self.units)
        self.fitter = Fitter(self.maker) if options.exact_memory else None
        self._predicted: dict[object, Prediction | None] = {}

    @cached_property
    def switches(self) -> LiveSwitches:
        """Prices of live switches."""
        return LiveSwitches(self.units)

    def finder(self, batches: Sequence[Batch]) -> Finder:
        """For candidates of one batch; warns where the profile is extrapolated."""
        profile = self.units.profile
        if not self._warned and profile.tokens[1] < LONGEST:  # a closed form holds for all lengths
            tokens = [b.tokens for b in batches]
            low, high = min(float(t.min()) for t in tokens), max(float(t.max()) for t in tokens)
            # One sample alone has tokens**2 pairs, so this is the longest it can be.
            longest = max(float(b.squares.max()) for b in batches) ** 0.5
            self._warned = profile.warn_outside((int(low), int(high)), int(longest)) is not None
        return Finder(self.units, self.elements, batches, self.switches)

    @cached_property
    def even_plans(self) -> tuple[Plan, ...]:
        """The static plans of every even layout, cut by cost."""
        world = self.units.num_devices
        costs = self.elements
        plans = []
        for stages in range(1, world + 1):
            if world % stages == 0 and stages <= costs.num_elements:
                for rounds, v in self.options.shapes:
                    if (2 if v else rounds) * stages > costs.num_elements:
                        continue
                    plan = static_plan(
                        costs.config, stages, world, unit=self.options.unit, rounds=rounds, v=v
                    )
                    plans.append(plan)
        return tuple(plans)

    def predicted(
        self, plan: Plan, batch: Batch, placed: Placed | None = None
    ) -> Prediction | None:
        """:func:`~megatron_flex.planner.simulation.predict`; of the latest plans what is known.

        A plan that names no schedule is known under the one that it was predicted with, too.

        Args:
            placed: its operations, if they have been placed.
        """

        def key(schedule: str) -> object:
            return plan.stages, plan.o_plan, plan.spare, schedule, batch.key

        if key(plan.schedule) not in self._predicted:
            found: Prediction | None
            if placed is not None and math.isinf(placed.stop):
                found = prediction_of(self.units, plan, batch, placed)
            else:
                found = predict(self.units, plan, batch)
            names = {plan.schedule, plan.schedule if found is None else found.schedule}
            self._predicted |= {key(name): found for name in names}
            while len(self._predicted) > 2 * REMEMBERED:
                self._predicted.pop(next(iter(self._predicted)))
        return self._predicted[key(plan.schedule)]

    def decided(self, plan: Plan, batch: Batch, prediction: Prediction | None) -> Plan:
        """A plan as a decision says it: how its batch is cut, and the schedule that it runs under.

        ``prediction``: its own; without it the schedule is left open.
        """
        plan = replace(plan, cut=batch.target)
        if prediction is None or self.options.schedule != AUTO:
            return plan
        spare = prediction.spare if policy(prediction.schedule).split else 0
        return replace(plan, schedule=prediction.schedule, spare=spare)

    def fitted(
        self, finder: Finder, candidate: Candidate, running: Plan | None = None
    ) -> Candidate:
        """The candidate with what its program needs for its memory; ``running``: before it."""
        if self.fitter is None:
            return candidate
        pricer = finder.pricers[candidate.micro_batching]
        return replace(candidate, price=self.fitter.fit(pricer, candidate.price, running))

    def runs(self, candidate: Candidate, running: Running | None) -> bool:
        """Whether a candidate fits, and so does the switch to it."""
        if not candidate.price.fits:
            return False
        if running is None or self.fitter is None:
            return True
        return self.fitter.hands_over(running, candidate.plan)


def running_of(costs: ModelCosts, price: Price, seconds: float | None = None) -> Running:
    """An iteration as the next switch sees it."""
    budget = float(costs.budget)
    if costs.options.exact_memory:
        budget = allowance(budget)
    spare = tuple(max(0.0, budget - size) for size in price.device_bytes)
    return Running(price.plan, price.seconds if seconds is None else seconds, spare)
