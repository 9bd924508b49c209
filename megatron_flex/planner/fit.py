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
from megatron_flex.planner.cost import Group
from megatron_flex.planner.limits import allowance
from megatron_flex.planner.maker import Made, Maker
from megatron_flex.planner.optimise import GroupOptimisation, o_plan, optimise, optimised
from megatron_flex.planner.options import AUTO
from megatron_flex.planner.plan import OPlan, Plan
from megatron_flex.planner.plans import groups_of
from megatron_flex.planner.pricing import Price, Pricer
from megatron_flex.planner.simulation import FUSED, SEARCHED, schedule_of
from megatron_flex.planner.switching import Running, Way, joiner_bytes, switch
from megatron_flex.planner.tables import Tables
from megatron_flex.schedule.list_scheduler import policy
from megatron_flex.schedule.policies.one_f_one_b import ONE_F_ONE_B
from megatron_flex.schedule.policies.policy import out_of_step
from megatron_flex.schedule.shards import cuts

CLEAR = 0.85
"""A plan whose bound is below this part of the budget fits without being looked at."""
MOST_DEVICES = 64
"""Instruction lists of more devices take too long to make for a decision; there the bound rules."""
_ATTEMPTS = 10
_BATCHES = 16
_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.3, 1.7, 2.2, math.inf)
"""Of what is missing by the bound, so much is saved for a split backward, to see what is best; at
last all that can be, also where nothing is missing."""
_LOOKED_AT = 8
"""Units whose activations are taken back if the plan fits without; each takes a program."""


class Fitter:
    """Fits priced plans into the budget, by the programs that ``maker`` makes of them."""

    def __init__(self, maker: Maker) -> None:
        self.maker = maker
        self._costs = maker.costs
        self._footprint = maker.footprint
        self._known: dict[tuple[object, ...], Price] = {}
        self._of_fused: dict[tuple[object, ...], Tables] = {}  # by batch

    def fit(self, pricer: Pricer, price: Price, running: Plan | None = None) -> Price:
        """The plan's layout with the memory optimisation with which its program fits.

        The least of it where the backward is fused. With a split one more of it may pay, since more
        can be in flight; where either may be, each has its own, and the faster program is taken.
        Its seconds are infinite where it fits with none; ``shortfall`` says what is missing.

        Args:
            running: the plan before it. Its own O_plan stays where it fits as well and costs hardly
                more: a change moves optimizer state to the host or back.
        """
        costs = self._costs
        if costs.ranks > MOST_DEVICES:
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
        if not kept.fits:
            return found
        most = self._seconds(pricer, found) * (1.0 + costs.options.margin)
        return kept if self._seconds(pricer, kept) <= most else found

    def _seconds(self, pricer: Pricer, price: Price) -> float:
        """What plans of one layout are compared by: the closed form knows no throttled pipeline."""
        if not self._costs.options.split or not price.fits:
            return price.seconds
        return self.maker.keep(price.plan, pricer.batch).seconds + price.swap

    def smallest(self, pricer: Pricer, plan: Plan) -> Price:
        """The plan's layout with all the memory optimisation there is."""
        tables = pricer.problem.tables
        parts = [optimise(tables, group, whole=True) for group in groups_of(tables, plan)]
        lean = _can_be_lean(plan, self._costs.options.schedule)
        smallest = replace(o_plan(tables, parts), lean=lean)
        return self._as_it_is(pricer, self._costs.placed(Plan(plan.stages, smallest)), 0.0)

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
        return peak <= allowance(costs.budget)

    def _fit(self, pricer: Pricer, plan: Plan) -> Price:
        batch, options = pricer.batch, self._costs.options
        schedule = schedule_of(plan, options)
        open_ = schedule == AUTO
        split = SEARCHED if open_ else schedule
        if not policy(split).split:
            tables = self._fused(batch) if options.schedule == AUTO else None
            return self._least(pricer, plan, schedule, tables)[1]
        groups = pricer.problem_of(plan).price(groups_of(pricer.problem.tables, plan)).groups
        missing = [group.missing for group in groups]
        if max(missing) <= 0:
            whole = self.maker.under(plan, batch, split)
            if whole.peak <= self.maker.allowed:
                nothing = [GroupOptimisation()] * len(missing)
                return self._priced(pricer, plan, nothing, 0.0, whole.peaks)
        best = self._roomy(pricer, plan, split, missing)
        if not open_:
            return best[1] if best is not None else self._least(pricer, plan, split)[1]
        # Memory optimisation takes time: what is too slow without is so with it.
        stop = math.inf if best is None else best[0]
        if best is None or self.maker.under_within(plan, batch, FUSED, stop) is not None:
            fused = self._least(pricer, plan, FUSED, self._fused(batch))
            if best is None or (fused[1].fits and fused[0] < stop):
                best = fused
        # The other backward may be faster with the same, by chance.
        return self._as_it_is(pricer, best[1].plan, best[1].missing)

    def _roomy(
        self, pricer: Pricer, plan: Plan, schedule: str, missing: Sequence[float]
    ) -> tuple[float, Price] | None:
        """Under a split backward: seconds, and the price with the memory optimisation that pays.

        A backward in halves fits with little, if hardly anything is in flight. So more and less are
        tried than what is missing by the bound, as long as that is faster.
        """
        tables, batch = pricer.problem.tables, pricer.batch
        groups = groups_of(tables, plan)
        allowed = self.maker.allowed
        best: tuple[float, Price] | None = None
        tried: dict[OPlan, bool] = {}

        def better(part: float) -> bool:
            """Whether so much of what is missing is the best so far."""
            nonlocal best
            parts = [
                _saving(tables, g, part if math.isinf(part) else part * m)
                for g, m in zip(groups, missing, strict=True)
            ]
            own = self._costs.placed(Plan(plan.stages, o_plan(tables, parts)))
            if own.o_plan in tried:
                return tried[own.o_plan]
            tried[own.o_plan] = False
            swap = max(p.swap_seconds for p in parts)
            stop = math.inf if best is None else best[0] - swap
            made = self.maker.under_within(own, batch, schedule, stop)
            if made is None or made.peak > allowed or made.seconds >= stop:
                return False
            price = self._priced(pricer, own, parts, max(missing), made.peaks)
            best = made.seconds + swap, price
            tried[own.o_plan] = True
            return True

        middle = _PARTS.index(1.0)
        for number, part in enumerate(_PARTS[middle:]):
            if not better(part) and best is not None and number > 0:
                break
        for part in reversed(_PARTS[:middle]):
            if not better(part):
                break
        better(0.0)  # nothing at all may do, though a little is no better than more
        return None if best is None else self._without_vain_copies(pricer, best[1], schedule)

    def _fused(self, batch: Batch) -> Tables:
        """Tables that know how much is in flight with a fused backward."""
        if batch.key not in self._of_fused:
            if len(self._of_fused) >= _BATCHES:
                self._of_fused.clear()
            options = replace(self._costs.options, schedule=FUSED)
            costs = replace(self._costs, options=options)
            self._of_fused[batch.key] = costs.tables(batch, None, costs.granule)
        return self._of_fused[batch.key]

    def _least(
        self, pricer: Pricer, plan: Plan, schedule: str, tables: Tables | None = None
    ) -> tuple[float, Price]:
        """Under a schedule: seconds, and the price with the least memory optimisation that fits.

        ``tables``: of what each unit saves; by default the batch's.
        """
        tables = pricer.problem.tables if tables is None else tables
        groups = groups_of(tables, plan)
        allowed = self.maker.allowed
        exhausted: set[int] = set()  # groups that do all they can
        parts = [GroupOptimisation()] * len(groups)
        first: list[float] = []  # bytes that each group lacks without memory optimisation

        def peaks_of(plan: Plan) -> tuple[float, ...]:
            return self.maker.under(plan, pricer.batch, schedule).peaks

        peaks = peaks_of(plan)
        # The first thing to give up is what is in flight because neighbours are out of step.
        lean = max(peaks) > allowed and _can_be_lean(plan, schedule)
        if lean:
            plan = self._costs.placed(Plan(plan.stages, OPlan(lean=True)))
            peaks = peaks_of(plan)
        for _ in range(_ATTEMPTS):
            over = [max(peaks[d] for d in group.devices) - allowed for group in groups]
            first = first or over
            missing = max(0.0, *first)
            if max(over) <= 0 or any(over[g] > 0 for g in exhausted):
                price = self._priced(pricer, plan, parts, missing, peaks)
                return self._without_vain_copies(pricer, price, schedule)
            for g in (g for g, lacks in enumerate(over) if lacks > 0):
                # Elements may save less than the bound says they do.
                said, saved = parts[g].recomputed + parts[g].offloaded, first[g] - over[g]
                rate = max(1.0, said / saved) if saved > 0 else 1.0
                parts[g] = optimise(tables, groups[g], said + rate * over[g])
                if math.isinf(parts[g].seconds):
                    parts[g] = optimise(tables, groups[g], whole=True)
                    exhausted.add(g)
            plan = self._costs.placed(Plan(plan.stages, replace(o_plan(tables, parts), lean=lean)))
            peaks = peaks_of(plan)
        for g in (g for g, lacks in enumerate(over) if lacks > 0):
            parts[g] = optimise(tables, groups[g], whole=True)
        plan = self._costs.placed(Plan(plan.stages, replace(o_plan(tables, parts), lean=lean)))
        price = self._priced(pricer, plan, parts, missing, peaks_of(plan))
        return self._without_vain_copies(pricer, price, schedule)

    def _without_vain_copies(
        self, pricer: Pricer, price: Price, schedule: str
    ) -> tuple[float, Price]:
        """Seconds, and the plan without activations on the host that it does not need to fit.

        The bound thinks that all but two micro-batches are away. In the program only passes with
        time before their backward travel, and the peak may be where they are back.
        """
        seconds = self.maker.under(price.plan, pricer.batch, schedule).seconds + price.swap
        if not price.fits:
            return seconds, price
        for unit in price.plan.o_plan.activations[:_LOOKED_AT]:
            o = price.plan.o_plan
            fewer = replace(o, activations=tuple(u for u in o.activations if u != unit))
            plan = self._costs.placed(Plan(price.plan.stages, fewer))
            made = self.maker.under(plan, pricer.batch, schedule)
            found = self._of(pricer, plan, price.missing, made)
            if found.fits and made.seconds + found.swap <= seconds:
                seconds, price = made.seconds + found.swap, found
        return seconds, price

    def _as_it_is(self, pricer: Pricer, plan: Plan, missing: float) -> Price:
        """A plan with its own O_plan."""
        return self._of(pricer, plan, missing, self.maker.keep(plan, pricer.batch))

    def _of(self, pricer: Pricer, plan: Plan, missing: float, made: Made) -> Price:
        """The same, of which there is a program."""
        tables = pricer.problem.tables
        parts = [optimised(tables, group, plan.o_plan) for group in groups_of(tables, plan)]
        return self._priced(pricer, plan, parts, missing, made.peaks)

    def _priced(
        self,
        pricer: Pricer,
        plan: Plan,
        parts: Sequence[GroupOptimisation],
        missing: float,
        peaks: tuple[float, ...],
    ) -> Price:
        problem = pricer.problem
        cost = problem.price(groups_of(problem.tables, plan))
        price = pricer.assembled(problem, plan, tuple(parts), missing, cost)
        price = replace(price, device_bytes=peaks)
        short = max(peaks) - self.maker.allowed
        if short <= 0:
            return price
        return replace(price, seconds=math.inf, before_update=math.inf, shortfall=short)


def _can_be_lean(plan: Plan, schedule: str) -> bool:
    """Whether a lean plan has fewer forwards in flight."""
    return schedule in (ONE_F_ONE_B.name, AUTO) and out_of_step(plan.degrees, 0) > 0


def _saving(tables: Tables, group: Group, size: float) -> GroupOptimisation:
    """What saves so many bytes of a group, or all there is."""
    if size <= 0:
        return GroupOptimisation()
    found = GroupOptimisation() if math.isinf(size) else optimise(tables, group, size)
    enough = math.isfinite(size) and math.isfinite(found.seconds)
    return found if enough else optimise(tables, group, whole=True)
