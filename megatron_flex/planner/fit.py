"""Makes a plan fit by what its instruction lists take, device by device.

The searches judge memory by a bound (the largest micro-batches together, see :mod:`cost`). For the
few plans that a decision is between, the very program that workers would run is built and gone
through (:mod:`footprint`): what it lacks is saved by memory optimisation, and no more than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_flex.planner.build import Batch
from megatron_flex.planner.limits import allowance
from megatron_flex.planner.maker import Maker
from megatron_flex.planner.optimise import GroupOptimisation, o_plan, optimise, optimised
from megatron_flex.planner.options import AUTO
from megatron_flex.planner.plan import OPlan, Plan
from megatron_flex.planner.plans import groups_of
from megatron_flex.planner.pricing import Price, Pricer, price_with
from megatron_flex.planner.switching import Running, Way, joiner_bytes, switch
from megatron_flex.schedule.policies.one_f_one_b import ONE_F_ONE_B
from megatron_flex.schedule.policies.policy import out_of_step
from megatron_flex.schedule.shards import cuts

CLEAR = 0.85
"""A plan whose bound is below this part of the budget fits without being looked at."""
MOST_DEVICES = 64
"""Instruction lists of more devices take too long to make for a decision; there the bound rules."""
_ATTEMPTS = 10
_LOOKED_AT = 8
"""Units whose activations are taken back if the plan fits without; each takes a program."""


class Fitter:
    """Fits priced plans into the budget, by the programs that ``maker`` makes of them."""

    def __init__(self, maker: Maker) -> None:
        self.maker = maker
        self._costs = maker.costs
        self._footprint = maker.footprint
        self._known: dict[tuple[object, ...], Price] = {}

    def fit(self, pricer: Pricer, price: Price, running: Plan | None = None) -> Price:
        """The plan's layout with the least memory optimisation with which its program fits.

        Its seconds are infinite where it fits with none; ``shortfall`` says what is missing.

        Args:
            running: the plan before it. Its own O_plan stays where it fits as well and costs hardly
                more: a change moves optimizer state to the host or back.
        """
        costs = self._costs
        if len(costs.devices) > MOST_DEVICES:
            return price
        clear = max(price.device_bytes) <= CLEAR * costs.budget
        if price.missing <= 0 and clear and not price.plan.o_plan.lean:
            return price
        key = (price.plan.stages, *pricer.batch.key)
        if key not in self._known:
            if len(self._known) > 1000:
                self._known.clear()
            self._known[key] = self._fit(pricer, costs.placed(Plan(price.plan.stages)))
        found = self._known[key]
        same = running is not None and running.stages == found.plan.stages
        if running is None or not same:
            return found
        lean = found.plan.o_plan.lean  # nothing moves for it
        before = replace(running.o_plan, lean=lean)
        least = costs.placed(Plan(running.stages, OPlan(lean=lean))).o_plan
        if before in (least, found.plan.o_plan):
            return found
        kept = self._as_it_is(pricer, Plan(running.stages, before), found.missing)
        return kept if kept.seconds <= found.seconds * (1.0 + costs.options.margin) else found

    def smallest(self, pricer: Pricer, plan: Plan) -> Price:
        """The plan's layout with all the memory optimisation there is."""
        tables = pricer.problem.tables
        parts = [optimise(tables, group, whole=True) for group in groups_of(tables, plan)]
        smallest = replace(o_plan(tables, parts), lean=self._can_be_lean(plan))
        return self._as_it_is(pricer, self._costs.placed(Plan(plan.stages, smallest)), 0.0)

    def peaks(self, plan: Plan, batch: Batch) -> tuple[float, ...]:
        """Peak bytes of every device of the world, by the program that would run."""
        return tuple(map(max, self.maker.keep(plan, batch).memory))

    def hands_over(self, running: Running, plan: Plan) -> bool:
        """Whether all devices have room for what is handed over from ``running`` to ``plan``."""
        costs = self._costs
        world = costs.cluster.world_size
        anew = cuts(running.plan, plan, costs.layers, self._footprint.elements)
        moves = [m for m in switch(costs, running, plan).moves if m.slab not in anew]
        if anew:  # what is cut anew comes early, whether there is room or not
            early = self._footprint.cut_anew(running.plan, plan, world)
            for m in moves:
                if m.way is Way.JOIN_EARLY:
                    early[m.device] += m.size + joiner_bytes(costs, m.slab)
            if any(size > room for size, room in zip(early, running.spare, strict=True)):
                return False
        late = {(m.slab, m.device) for m in moves if m.way is Way.HAND_OVER}
        if not late:
            return True
        arrived = self._footprint.handed_over(running.plan, plan, late, world)
        windows = (self._footprint.windows(running.plan, device) for device in range(world))
        peak = max(a + w for a, w in zip(arrived, windows, strict=True))
        return peak <= allowance(costs.budget, 0.0)  # no message is under way then

    def _fit(self, pricer: Pricer, plan: Plan) -> Price:
        tables = pricer.problem.tables
        groups = groups_of(tables, plan)
        devices = [[tables.devices[slot] for slot in group.slots] for group in groups]
        allowed = self.maker.allowed(plan, pricer.batch)
        exhausted: set[int] = set()  # groups that do all they can
        parts = [GroupOptimisation()] * len(groups)
        first: list[float] = []  # bytes that each group lacks without memory optimisation
        peaks = self.peaks(plan, pricer.batch)
        # The first thing to give up is what is in flight because neighbours are out of step.
        lean = max(peaks) > allowed and self._can_be_lean(plan)
        if lean:
            plan = self._costs.placed(Plan(plan.stages, OPlan(lean=True)))
            peaks = self.peaks(plan, pricer.batch)
        for _ in range(_ATTEMPTS):
            over = [max(peaks[d] for d in group) - allowed for group in devices]
            first = first or over
            missing = max(0.0, *first)
            if max(over) <= 0 or any(over[g] > 0 for g in exhausted):
                price = self._priced(pricer, plan, parts, missing, peaks)
                return self._without_vain_copies(pricer, price)
            for g in (g for g, lacks in enumerate(over) if lacks > 0):
                # Elements may save less than the bound says they do.
                said, saved = parts[g].recomputed + parts[g].offloaded, first[g] - over[g]
                rate = max(1.0, said / saved) if saved > 0 else 1.0
                parts[g] = optimise(tables, groups[g], said + rate * over[g])
                if math.isinf(parts[g].seconds):
                    parts[g] = optimise(tables, groups[g], whole=True)
                    exhausted.add(g)
            plan = self._costs.placed(Plan(plan.stages, replace(o_plan(tables, parts), lean=lean)))
            peaks = self.peaks(plan, pricer.batch)
        for g in (g for g, lacks in enumerate(over) if lacks > 0):
            parts[g] = optimise(tables, groups[g], whole=True)
        plan = self._costs.placed(Plan(plan.stages, replace(o_plan(tables, parts), lean=lean)))
        return self._priced(pricer, plan, parts, missing, self.peaks(plan, pricer.batch))

    def _without_vain_copies(self, pricer: Pricer, price: Price) -> Price:
        """The plan without activations on the host that it does not need to fit.

        The bound thinks that all but two micro-batches are away. In the program only passes with
        time before their backward travel, and the peak may be where they are back.
        """
        if not price.fits:
            return price
        for unit in price.plan.o_plan.activations[:_LOOKED_AT]:
            o = price.plan.o_plan
            fewer = replace(o, activations=tuple(u for u in o.activations if u != unit))
            plan = self._costs.placed(Plan(price.plan.stages, fewer))
            found = self._as_it_is(pricer, plan, price.missing)
            if found.fits:
                price = found
        return price

    def _can_be_lean(self, plan: Plan) -> bool:
        """Whether a lean plan has fewer forwards in flight."""
        schedule = plan.schedule or self._costs.options.schedule
        return schedule in (ONE_F_ONE_B.name, AUTO) and out_of_step(plan.degrees, 0) > 0

    def _as_it_is(self, pricer: Pricer, plan: Plan, missing: float) -> Price:
        """A plan with its own O_plan."""
        tables = pricer.problem.tables
        parts = [optimised(tables, group, plan.o_plan) for group in groups_of(tables, plan)]
        return self._priced(pricer, plan, parts, missing, self.peaks(plan, pricer.batch))

    def _priced(
        self,
        pricer: Pricer,
        plan: Plan,
        parts: Sequence[GroupOptimisation],
        missing: float,
        peaks: tuple[float, ...],
    ) -> Price:
        price = replace(price_with(pricer, plan, parts, missing), device_bytes=peaks)
        short = max(peaks) - self.maker.allowed(plan, pricer.batch)
        if short <= 0:
            return price
        return replace(price, seconds=math.inf, before_update=math.inf, shortfall=short)
