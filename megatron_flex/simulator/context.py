"""Context parallelism inside a server (ring attention: Liu et al., 2023, arXiv:2310.01889).

c devices share each micro-batch: each has 1/c of every sample's tokens, balanced over the causal
mask, and computes attention with the keys and values that go round in a ring. So a group of c
devices is one logical device whose micro-batches have 1/c of the tokens and of the token pairs. On
top come:

- the ring: in the forward pass c - 1 messages of keys and values, in the backward pass these and
  their gradients, over the links inside a server. Attention of the blocks that have arrived hides
  them; what it does not hide is added;
- a kernel for each of the c blocks;
- gradients are summed over c times as many devices. Where a stage has one replica only, that sum is
  counted with the update, as nothing hides it.

Each sample is rounded up to 2c tokens, as balancing over the mask needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron_flex.data.cut import Cut
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.model.layers import Kind
from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.flops import kind_work
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.simulation import op_costs
from megatron_flex.planner.ways import micro_batches
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.static import Runner, Variant


def shared(parts: Sequence[MicroBatch], degree: int) -> Batch:
    """What one of ``degree`` devices has of packed micro-batches of whole samples."""
    step = 2 * degree
    rounded = [[-(-s.length // step) * step for s in m.slices] for m in parts]
    tokens = [sum(row) / degree for row in rounded]
    squares = [sum(n * n for n in row) / degree for row in rounded]
    return Batch(np.array(tokens, dtype=np.float64), np.array(squares, dtype=np.float64))


@dataclass(frozen=True, eq=False)
class Ring:
    """What the ring costs; ``costs`` are of logical devices."""

    costs: ModelCosts
    degree: int

    def op_costs(self, plan: Plan, batch: Batch) -> OpCosts:
        """Costs of every operation, the ring's share in them."""
        costs, c = self.costs, self.degree
        own = op_costs(costs, plan, batch)
        if c == 1:
            return own
        forward = self._exposed(batch)
        starts = [s.start for s in plan.stages]
        units = np.array([float(Kind.ATTENTION in kinds) for kinds in costs.kinds])
        again = np.zeros(costs.num_elements)
        again[list(plan.o_plan.recompute)] = 1.0
        count = np.add.reduceat(units, starts)
        twice = np.add.reduceat(units * again, starts)
        reduce, update = self._sums(plan, own)
        return replace(
            own,
            forward=own.forward + np.outer(count, forward),
            backward_input=own.backward_input + np.outer(2.0 * count + twice, forward),
            reduce=reduce,
            update=update,
        )

    def _exposed(self, batch: Batch) -> NDArray[np.float64]:
        """Seconds that a forward of one attention unit waits for its ring, of each micro-batch."""
        costs, c = self.costs, self.degree
        config, device = costs.config, costs.cluster.device
        fixed, rate = device.attention.line()
        element = costs.profile.boundary / config.hidden_size
        width = 2.0 * config.num_query_groups * config.kv_channels * element
        link = costs.intra
        wires = (c - 1) * (link.latency + batch.tokens * width / link.bytes_per_second)
        work = kind_work(config, Kind.ATTENTION).quadratic * batch.squares
        hides = work * rate * (c - 1) / c
        found: NDArray[np.float64] = np.maximum(0.0, wires - hides) + (c - 1) * fixed
        return found

    def _sums(self, plan: Plan, own: OpCosts) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of each slab's reduction and update over c times as many devices."""
        costs, c = self.costs, self.degree
        groups = [s.group for s in plan.stages for _ in range(s.start, s.stop)]
        if costs.layers.tied:
            groups.append(tuple({*plan.stages[0].group, *plan.stages[-1].group}))
        reduce, update = [], []
        for slab, group in enumerate(groups):
            holders = len(group) * c * own.width
            inside = len({costs.cluster.server_of(d) for d in group}) == 1
            link = costs.intra if inside else costs.cluster.inter
            turns = 2 * (holders - 1)
            size = costs.slab_gradients[slab]
            seconds = turns * (link.latency + size / holders / link.bytes_per_second)
            reduce.append(seconds)
            alone = len(group) * own.width == 1
            update.append(own.update[slab] + (seconds if alone else 0.0))
        return tuple(reduce), tuple(update)


@dataclass(frozen=True)
class Shared:
    """Packed to so many tokens on all devices of a group together (a rule of ``batching.py``)."""

    cut: Cut
    degree: int
    by_plan: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """See :class:`~megatron_flex.simulator.batching.Batching`."""
        return f"{self.cut.tokens} tokens over {self.degree} devices"

    def ways(self, lengths: Sequence[int], plan: Plan, costs: ModelCosts) -> tuple[Batch, ...]:
        """See :class:`~megatron_flex.simulator.batching.Batching`."""
        return (shared(micro_batches(self.cut, lengths), self.degree),)


class ContextRunner(Runner):
    """Static plans whose devices are groups of devices."""

    def __init__(self, setting: Setting, variant: Variant, degree: int) -> None:
        self._degree = degree
        super().__init__(setting, variant)
        self._ring = Ring(self.costs, degree)

    def _planner(self, setting: Setting) -> Planner:
        inner = setting.of_groups(self._degree, setting.config, setting.full.profile)
        return super()._planner(inner)

    def op_costs(self, plan: Plan, batch: Batch) -> OpCosts:
        """With what the ring costs."""
        return self._ring.op_costs(plan, batch)
