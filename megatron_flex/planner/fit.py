"""Makes a plan fit by what its instruction lists take, device by device.

The searches judge memory by a bound (the largest micro-batches together, see :mod:`cost`). For the
few plans that a decision is between, the very program that workers would run is built and gone
through (:mod:`footprint`): what it lacks is saved by memory optimisation, and no more than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.footprint import Footprint
from megatron_flex.planner.optimise import GroupOptimisation, o_plan, optimise
from megatron_flex.planner.ordering import op_costs
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.plans import groups_of
from megatron_flex.planner.pricing import Price, Pricer, price_with
from megatron_flex.planner.switching import Running, Way, switch
from megatron_flex.schedule.list_scheduler import build, policy

MARGIN = 0.02
"""Part of the budget that plans leave free, for what the model of memory does not know."""
CLEAR = 0.85
"""A plan whose bound is below this part of the budget fits without being looked at."""
MOST_DEVICES = 64
"""Instruction lists of more devices take too long to make for a decision; there the bound rules."""
_ATTEMPTS = 10
_MORE = 1.15  # of what is missing after the first attempt: elements save less than their bound says


@dataclass(frozen=True)
class _Size:
    tokens: int
    squares: int


class Fitter:
    """Fits priced plans into the budget of ``costs``, which must be of single units."""

    def __init__(self, costs: ModelCosts) -> None:
        self._costs = costs
        self._footprint = Footprint(costs.config, exact=costs.options.bitwise)
        self._known: dict[tuple[object, ...], Price] = {}

    def fit(self, pricer: Pricer, price: Price) -> Price:
        """The plan's layout with the least memory optimisation with which its program fits.

        Its seconds are infinite where it fits with none; ``shortfall`` says what is missing.
        """
        costs = self._costs
        if len(costs.devices) > MOST_DEVICES:
            return price
        if price.missing <= 0 and max(price.device_bytes) <= CLEAR * costs.budget:
            return price
        key = (price.plan.stages, pricer.batch.tokens.tobytes(), pricer.batch.squares.tobytes())
        if key not in self._known:
            if len(self._known) > 1000:
                self._known.clear()
            self._known[key] = self._fit(pricer, Plan(price.plan.stages))
        return self._known[key]

    def peaks(self, plan: Plan, batch: Batch) -> tuple[float, ...]:
        """Peak bytes of every device of the world."""
        costs = self._costs
        sizes = [_Size(int(t), int(s)) for t, s in zip(batch.tokens, batch.squares, strict=True)]
        program = build(
            plan,
            costs.layers,
            op_costs(costs.config, plan, sizes),
            [size.tokens for size in sizes],
            policy(costs.options.schedule),
            world_size=costs.cluster.world_size,
        ).program
        return self._footprint.peaks(program)

    def hands_over(self, running: Running, plan: Plan) -> bool:
        """Whether all devices have room for what is handed over from ``running`` to ``plan``."""
        costs = self._costs
        moves = switch(costs, running, plan).moves
        late = {(m.slab, m.device) for m in moves if m.way is Way.HAND_OVER}
        if not late:
            return True
        world = costs.cluster.world_size
        return max(self._footprint.handed_over(running.plan, plan, late, world)) <= costs.budget

    def _fit(self, pricer: Pricer, plan: Plan) -> Price:
        tables = pricer.problem.tables
        groups = groups_of(tables, plan)
        devices = [[tables.devices[slot] for slot in group.slots] for group in groups]
        allowed = (1.0 - MARGIN) * self._costs.budget
        targets = [0.0] * len(groups)
        parts: Sequence[GroupOptimisation] = (GroupOptimisation(),) * len(groups)
        first: float | None = None  # bytes missing without memory optimisation
        for _ in range(_ATTEMPTS):
            peaks = self.peaks(plan, pricer.batch)
            over = [max(peaks[d] for d in group) - allowed for group in devices]
            worst = max(over)
            more = 1.0 if first is None else _MORE
            first = worst if first is None else first
            if worst <= 0:
                price = price_with(pricer, plan, parts, max(0.0, first))
                return replace(price, device_bytes=peaks)
            targets = [t + more * max(0.0, o) for t, o in zip(targets, over, strict=True)]
            parts = [optimise(tables, g, t) for g, t in zip(groups, targets, strict=True)]
            if any(math.isinf(part.seconds) for part in parts):
                break
            plan = Plan(plan.stages, o_plan(tables, parts))
        return self._with_everything(pricer, Plan(plan.stages), first or 0.0)

    def _with_everything(self, pricer: Pricer, plan: Plan, missing: float) -> Price:
        """The last resort: all that may be optimised, in every group."""
        tables = pricer.problem.tables
        groups = groups_of(tables, plan)
        parts = [optimise(tables, group, whole=True) for group in groups]
        plan = Plan(plan.stages, o_plan(tables, parts))
        peaks = self.peaks(plan, pricer.batch)
        short = max(peaks) - (1.0 - MARGIN) * self._costs.budget
        price = replace(price_with(pricer, plan, parts, missing), device_bytes=peaks)
        if short <= 0:
            return price
        return replace(price, seconds=math.inf, before_update=math.inf, shortfall=short)
