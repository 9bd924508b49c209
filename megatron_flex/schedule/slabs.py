"""Which devices hold which slab under a plan, and which stages touch it."""

from __future__ import annotations

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan


def slab_stages(plan: Plan, layers: LayerList) -> tuple[tuple[int, ...], ...]:
    """For each slab, the stages whose units use it, ascending (a tied slab: first and last)."""
    if plan.num_units != layers.num_units:
        raise ValueError(
            f"the plan '{plan}' covers {plan.num_units} units, the model has {layers.num_units}"
        )
    stages: list[list[int]] = [[] for _ in range(layers.num_slabs)]
    for number, stage in enumerate(plan.stages):
        for unit in range(stage.start, stage.stop):
            for slab in layers.units[unit].slabs:
                if number not in stages[slab]:
                    stages[slab].append(number)
    return tuple(map(tuple, stages))


def slab_holders(plan: Plan, layers: LayerList) -> tuple[tuple[int, ...], ...]:
    """For each slab, the devices that hold it, ascending."""
    return tuple(
        tuple(sorted({d for s in stages for d in plan.stages[s].group}))
        for stages in slab_stages(plan, layers)
    )
