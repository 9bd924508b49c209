"""A second estimate for fused backwards and uneven micro-batches: a wave through the stages.

The closed form of :mod:`cost` adds up stages as if micro-batches were alike: with sizes that
differ it is too low, since a large micro-batch on one stage makes the next one wait. The wave takes
every micro-batch through the stages in order, each stage busy for its whole forward and backward,
as in a flow shop: with equal sizes it is the same ``sum t + (n - 1) * max t``, with sizes that
differ it is too high, since forwards run ahead of backwards. Their mean is near the simulation
(docs/planner.md has the figures); where the backward is split, the closed form alone is nearer.
"""

from __future__ import annotations

from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.routing import Route


def wave_seconds(costs: OpCosts, table: Route) -> float:
    """The makespan of the wave, seconds, without reductions and updates.

    Args:
        table: ``table[stage][micro_batch]`` is the device that runs it.
    """
    free: dict[int, float] = {}
    ready = [0.0] * costs.num_micro_batches
    for stage, devices in enumerate(table):
        wire = costs.transfer[stage - 1] if stage else None
        for micro_batch, (device, work) in enumerate(
            zip(devices, costs.stage_work(stage), strict=True)
        ):
            begin = ready[micro_batch]
            if wire is not None and table[stage - 1][micro_batch] != device:
                begin += wire[micro_batch]
            end = max(begin, free.get(device, 0.0)) + work
            ready[micro_batch] = free[device] = end
    return max(free.values())
