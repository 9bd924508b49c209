"""HBSA, the paper's planner (docs/planner.md), with its bounds and its four triggers.

1. N is the smallest number of stages with ``M_peak < N * M``.
2. If N is not the current number of stages: stages of ``floor(L/N)`` to ``min(floor(L/N) +
   L mod N, n_max)`` layers on ``floor(D/N)`` to ``floor(D/N) + D mod N`` devices. (The paper prints
   ``L mod N`` for the devices too, a slip: it allows more devices than there are.) n_max: the most
   layers whose state one device holds.
3. Among these the partition with the least time, by dynamic programming over (stage, layers,
   devices); without the stage in the state, partitions with other stage counts slip in.
4. Trigger: A and B: keep (①). A and not B: shrink (④). Not A: C and D: optimise memory (②); not D,
   or not C: grow (③).

Whole layers only: the first stage also holds the embedding, the last one the head. A and C compare
totals; so every device is checked afterwards, and if one does not fit, N + 1 stages are tried, and
when there are none, O_plan on every device. Where nothing else fits, the current layout stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.candidates import Candidate, Finder
from megatron_flex.planner.cost import Group, paper_time
from megatron_flex.planner.decision import Action, Decision, Predicted, Reason, action_of
from megatron_flex.planner.native_search import SearchProblem
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.plans import groups_of, plan_of
from megatron_flex.planner.switching import Running
from megatron_flex.planner.tables import Array


@dataclass(frozen=True)
class PeakFit:
    """M_peak as a line in the longest sample's tokens, in bytes: the paper's measured totals."""

    fixed: float
    per_token: float

    def __call__(self, longest: float) -> float:
        """Bytes of all devices of a pipeline together."""
        return self.fixed + self.per_token * longest


@dataclass(frozen=True)
class TotalOptimisation:
    """O_plan in totals, as the paper has it: r + s = M_peak - M * |S'|.

    Attributes:
        recomputed, offloaded: r and s in bytes.
        recompute_seconds, swap_seconds: what they cost.
        possible: whether so much can be saved at all.
    """

    recomputed: float = 0.0
    offloaded: float = 0.0
    recompute_seconds: float = 0.0
    swap_seconds: float = 0.0
    possible: bool = True


class Hbsa:
    """The paper's planner.

    Args:
        planner: model, cluster and options; searches cut between whole layers.
        peak: the paper's totals instead of the memory model; devices are then not checked.
        memory: M, bytes of one device in conditions A and C; default the planner's budget.
    """

    def __init__(
        self, planner: Planner, peak: PeakFit | None = None, memory: float | None = None
    ) -> None:
        self.planner = planner
        self.units = planner.units
        self.layers = WholeLayers(planner.units)
        self.peak = peak
        self.memory = planner.units.budget if memory is None else memory

    def decide(
        self, batch: Batch, running: Running | None, longest: float | None = None
    ) -> Decision:
        """The decision for the next iteration.

        Args:
            batch: its micro-batches.
            running: the iteration before; ``None`` at the start.
            longest: the longest sample's tokens, for ``peak``; default the longest micro-batch's.

        Raises:
            Infeasible: no number of stages fits.
        """
        length = float(batch.tokens.max()) if longest is None else longest
        finder = Finder(self.units, self.units, [batch], self.planner.switches)
        wanted = self._stages(batch, length)
        if running is None:
            found, nearest = self._search(finder, None, wanted)
            if found is None:
                raise finder.infeasible(None if nearest is None else nearest.price)
            return self._decision(found, None, (), finder, None)
        kept = self._fitted(finder, running.plan, running)
        stages = len(kept.plan.stages)
        if wanted == stages and (self.peak is not None or kept.price.missing <= 0):
            a = self._condition_a(batch, length, stages)
            return self._decision(kept, kept, (a,), finder, None)
        other, nearest = self._search(finder, running, wanted if wanted != stages else stages + 1)
        if other is None and not self._can_stay(batch, length, kept):
            if nearest is None or not nearest.price.fits:
                raise finder.infeasible((nearest or kept).price)
            other = nearest  # over the margin in the switch: without it training ends
        return self._trigger(finder, kept, other, batch, length)

    def _can_stay(self, batch: Batch, length: float, kept: Candidate) -> bool:
        """Whether the current layout fits, if need be with memory optimisation."""
        if self.peak is None:
            return kept.price.fits
        if self._condition_a(batch, length, len(kept.plan.stages)).holds:
            return True
        return self._optimise(batch, length, kept).possible

    def _trigger(
        self, finder: Finder, kept: Candidate, other: Candidate | None, batch: Batch, length: float
    ) -> Decision:
        """Step 4 of the algorithm. Without another layout the current one stays; it can."""
        stages = len(kept.plan.stages)
        a = self._condition_a(batch, length, stages)
        fits = a.holds and (self.peak is not None or kept.price.missing <= 0)
        if other is None and fits:
            return self._decision(kept, kept, (a,), finder, None)
        stay, switched = self.seconds(batch, kept.plan), math.inf
        if other is not None:
            switched = self.seconds(batch, other.plan) + other.switch_seconds
        if fits:
            b = Reason("B", "switching does not pay: T(S->G) + T_switch >= T(S'->G')",
                       switched, stay, "seconds", switched >= stay)  # fmt: skip
            if other is None or b.holds:
                return self._decision(kept, kept, (a, b), finder, other)
            return self._decision(other, kept, (a, b), finder, kept)
        total = self._optimise(batch, length, kept)
        after = self._peak(batch, length, stages) - total.recomputed - total.offloaded
        possible = total.possible and (self.peak is not None or kept.price.fits)
        c = Reason("C", "memory optimisation makes it fit: M_after <= M |G'|",
                   after, self.memory * stages, "bytes", possible)  # fmt: skip
        if other is None:
            return self._decision(kept, kept, (a, c), finder, None, total)
        if not c.holds:
            return self._decision(other, kept, (a, c), finder, kept)
        optimised = stay + total.recompute_seconds + total.swap_seconds
        d = Reason("D", "optimising is no slower: T(S->G) + T_switch >= T(S'->G') + T_rc + T_swap",
                   switched, optimised, "seconds", switched >= optimised)  # fmt: skip
        if d.holds:
            return self._decision(kept, kept, (a, c, d), finder, other, total)
        return self._decision(other, kept, (a, c, d), finder, kept)

    def seconds(self, batch: Batch, plan: Plan) -> float:
        """Time of an iteration under the chosen time model."""
        if self.planner.options.time_model == "pipeline":
            return self.planner.finder([batch]).pricers[0].price(plan).seconds
        return paper_time(self.layers.stage_seconds(batch, plan), len(batch.tokens))

    def _stages(self, batch: Batch, length: float) -> int:
        """Step 1: the smallest N with M_peak < N M."""
        most = min(self.units.num_devices, self.units.config.num_layers)
        for n in range(1, most + 1):
            if self._peak(batch, length, n) < n * self.memory:
                return n
        return most

    def _peak(self, batch: Batch, length: float, stages: int) -> float:
        """M_peak: bytes of all stages together, of one replica each."""
        if self.peak is not None:
            return self.peak(length)
        return self.layers.peak(batch, stages)

    def _condition_a(self, batch: Batch, length: float, stages: int) -> Reason:
        peak, room = self._peak(batch, length, stages), self.memory * stages
        text = "the batch fits the current layout: M_peak <= M |G'|"
        return Reason("A", text, peak, room, "bytes", peak <= room)

    def _search(
        self, finder: Finder, running: Running | None, wanted: int
    ) -> tuple[Candidate | None, Candidate | None]:
        """Steps 2 and 3, then the check of every device.

        Also the plan that was nearest to fitting, where none does.
        """
        most = min(self.units.num_devices, self.units.config.num_layers)
        last: Candidate | None = None
        nearest: Candidate | None = None
        for n in range(wanted, most + 1):
            plan = self.layers.search(finder.pricers[0].batch, n, self.planner.options.bounds)
            if plan is None:
                continue
            candidate = self._fitted(finder, plan, running)
            if self.peak is not None:
                return candidate, None
            if self.planner.runs(candidate, running):
                if candidate.price.missing <= 0:
                    return candidate, None
                last = last or candidate  # with O_plan, if no number of stages does without
            if nearest is None or candidate.price.shortfall < nearest.price.shortfall:
                nearest = candidate
        return last, nearest

    def _fitted(self, finder: Finder, plan: Plan, running: Running | None) -> Candidate:
        """A layout, with what its program needs for its memory where the planner looks at that."""
        candidate = finder.best_of(plan, running)
        if self.peak is not None:
            return candidate
        return self.planner.fitted(finder, candidate, None if running is None else running.plan)

    def _optimise(self, batch: Batch, length: float, kept: Candidate) -> TotalOptimisation:
        """O_plan of the current layout, in totals when M_peak is the paper's."""
        if not self.planner.options.memory_optimisation:
            return TotalOptimisation(possible=False)
        if self.peak is None:
            parts = kept.price.parts
            return TotalOptimisation(
                recomputed=sum(p.recomputed for p in parts),
                offloaded=sum(p.offloaded for p in parts),
                recompute_seconds=max((p.recompute_seconds for p in parts), default=0.0),
                swap_seconds=max((p.swap_seconds for p in parts), default=0.0),
                possible=kept.price.fits,
            )
        stages = len(kept.plan.stages)
        excess = self.peak(length) - self.memory * stages
        return self.layers.total_optimisation(batch, kept.plan, self.peak(length), excess)

    def _decision(
        self,
        chosen: Candidate,
        kept: Candidate | None,
        reasons: Sequence[Reason],
        finder: Finder,
        rest: Candidate | None,
        total: TotalOptimisation | None = None,
    ) -> Decision:
        plan = chosen.plan
        if self.peak is not None:
            plan = self.units.placed(Plan(plan.stages))  # the paper says nothing of single units
        plan = self.planner.decided(plan, finder.pricers[0].batch, None)
        action = action_of(None if kept is None else kept.plan, plan)
        if total is not None and (total.recomputed or total.offloaded):
            action = Action.OPTIMISE
        return Decision(
            plan=plan,
            action=action,
            micro_batching=0,
            predicted=self._predicted(finder, chosen, total),
            reasons=tuple(reasons),
            current=None if kept is None else self._predicted(finder, kept, None),
            runner_up=None if rest is None else (rest.plan, self._predicted(finder, rest, None)),
            budget=self.memory,
            planner="hbsa",
        )

    def _predicted(
        self, finder: Finder, candidate: Candidate, total: TotalOptimisation | None
    ) -> Predicted:
        known = candidate.price.predicted(candidate.change)
        batch = finder.pricers[0].batch
        seconds = self.seconds(batch, candidate.plan)
        if total is None:
            total = TotalOptimisation()
            if self.peak is None and candidate.price.fits and candidate.price.missing > 0:
                total = TotalOptimisation(
                    known.recomputed_bytes, known.offloaded_bytes,
                    known.recompute_seconds, known.swap_seconds,
                )  # fmt: skip
        if self.planner.options.time_model == "paper":
            seconds += total.recompute_seconds + total.swap_seconds
        return Predicted(
            seconds=seconds,
            switch_seconds=candidate.switch_seconds,
            recompute_seconds=total.recompute_seconds,
            swap_seconds=total.swap_seconds,
            device_bytes=known.device_bytes,
            recomputed_bytes=total.recomputed,
            offloaded_bytes=total.offloaded,
            simulated=False,
        )


class WholeLayers:
    """The model as HBSA sees it: whole layers, embedding and head with the first and last."""

    def __init__(self, units: ModelCosts) -> None:
        self.units = units
        one = np.ones(1)
        self._devices = units.tables(Batch(one, one))  # for its units
        count = units.config.num_layers
        inner = tuple(1 + 2 * layer for layer in range(1, count))
        self.costs = replace(units, given_points=(0, *inner, units.layers.num_units))

    def search(self, batch: Batch, stages: int, bounded: bool) -> Plan | None:
        """The partition of least eq. 1 into ``stages`` stages; ``None`` if bounds allow none."""
        costs = self.costs
        tables = costs.tables(batch)
        problem = SearchProblem(tables)
        layers, devices = costs.num_elements, costs.num_devices
        if stages > min(layers, devices):
            return None
        most = self._most_layers()
        low, spare = divmod(layers, stages)
        device_low, device_spare = divmod(devices, stages)
        bounds = (1, most, 1, devices)
        if bounded:
            bounds = (low, min(low + spare, most), device_low, device_low + device_spare)
        groups = problem.partition(stages, bounds, self._hops(batch))
        return None if groups is None else plan_of(tables, groups)

    def _most_layers(self) -> int:
        """n_max: whole layers whose state one device holds."""
        costs = self.costs
        state = float((costs.state + costs.optimizer)[costs.num_elements // 2])
        return max(1, min(costs.num_elements, int(costs.budget // state)))

    def _hops(self, batch: Batch) -> tuple[float, float]:
        """Seconds of a mean micro-batch's activation and gradient, inner and outer link."""
        costs, size = self.costs, self.costs.profile.boundary * float(batch.tokens.mean())
        return (2.0 * costs.intra.seconds(size), 2.0 * costs.between.seconds(size))

    def stage_seconds(self, batch: Batch, plan: Plan) -> tuple[float, ...]:
        """t_i of every stage of any plan: one mean micro-batch over the stage's replicas.

        ``(work + communication with the stage before) / d + (gradient reduction + update) / n``.
        """
        units, n = self.units, len(batch.tokens)
        total = [n, float(batch.tokens.sum()), float(batch.squares.sum())]
        work = (units.forward + units.backward).T @ total
        hops = self._hops(batch)
        return tuple(
            _stage_seconds(units, work, group, hops, n) for group in groups_of(self._devices, plan)
        )

    def peak(self, batch: Batch, stages: int) -> float:
        """M_peak of the memory model: state, activations in flight under 1F1B, buffers."""
        costs = self.costs
        tables = costs.tables(batch)
        state = float((costs.state + costs.optimizer).sum()) - tables.tied.state
        state -= tables.tied.optimizer
        # Stage s of an even pipeline holds stages - s micro-batches.
        activation = float(tables.activation.sum()) * float(batch.tokens.max())
        held = activation * (stages + 1) / 2.0 + tables.split * activation
        transient = float(tables.transient.max()) * float(batch.tokens.max())
        return state + held + stages * (tables.buffers + transient)

    def total_optimisation(
        self, batch: Batch, plan: Plan, peak: float, excess: float
    ) -> TotalOptimisation:
        """The cheapest r + s = ``excess`` bytes when ``peak`` bytes are used in all.

        State is known; the rest of ``peak`` are activations. Offload moves optimizer state there
        and back once an iteration over all stages' host links at once; recompute costs the forward
        of the part of the activations that it drops.
        """
        costs = self.costs
        options = costs.options
        tables = costs.tables(batch)
        state = float((costs.state + costs.optimizer).sum())
        optimizer = float(costs.optimizer.sum()) if options.offload_optimizer else 0.0
        activations = max(0.0, peak - state) if options.recompute else 0.0
        per_swapped = 2.0 * tables.wires.host_per_byte / len(plan.stages)
        replicas = len(plan.devices) / len(plan.stages)
        forward = float(tables.forward.sum()) / len(plan.stages) / replicas
        per_recomputed = forward / activations if activations > 0 else math.inf
        r = s = 0.0
        if per_recomputed <= per_swapped:
            r = min(excess, activations)
            s = min(excess - r, optimizer)
        else:
            s = min(excess, optimizer)
            r = min(excess - s, activations)
        return TotalOptimisation(
            r, s, r * per_recomputed if r else 0.0, s * per_swapped, r + s >= excess * (1 - 1e-12)
        )


def _stage_seconds(
    costs: ModelCosts, work: Array, group: Group, hops: tuple[float, float], n: int
) -> float:
    """t_i of the devices of ``group`` (all their chunks)."""
    elements, degree = list(group.elements), len(group.devices)
    servers = {int(costs.server[s]) for s in group.devices}
    before = min(group.devices) - 1
    inside = len(servers) == 1
    near = inside and before >= 0 and int(costs.server[before]) in servers
    seconds = float(work[elements].sum()) / n
    if elements[0] > 0:
        seconds += hops[0 if near else 1]
    link = costs.intra if inside else costs.cluster.inter
    ring = degree * costs.options.width
    turns = 2.0 * (ring - 1)
    reduce = float(costs.reduce[elements].sum())
    sync = turns * (link.latency + reduce / ring / link.bytes_per_second)
    return seconds / degree + (sync + float(costs.update[elements].sum())) / n
