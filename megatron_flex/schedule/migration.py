"""Live migration: the last micro-batches of an iteration already run on the next plan's layout.

A device that joins a slab early holds its weights from the moment they arrive until the update, so
it can compute with them. Joining early is then the case of no micro-batch at all. Routing is by
micro-batch and unit, whole micro-batches only: a backward runs where its forward ran. The stages of
both plans are cut to common pieces, each on all devices that compute it for some micro-batch; the
gradients of all holders are summed as ever.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.schedule.routing import Route
from megatron_flex.schedule.slabs import slab_holders
from megatron_flex.schedule.transition import Transition


@dataclass(frozen=True)
class Migration:
    """What an iteration runs on while it migrates.

    Attributes:
        plan: common pieces of both plans' stages. Their groups are all devices that hold them in
            the old plan, and those of the new one that compute them for some micro-batch.
        route: ``route[piece][micro_batch]`` is the device.
    """

    plan: Plan
    route: Route


def migrate(
    switch: Transition,
    old_route: Route,
    new_route: Route,
    moved: Collection[int],
    layers: LayerList,
) -> Migration:
    """Let the micro-batches ``moved`` run by the next plan as far as its devices can.

    Args:
        switch: from the plan that the devices are in.
        old_route: of all micro-batches on ``switch.plan``.
        new_route: of all micro-batches on ``switch.next_plan``.

    A device to which a unit is only handed over after the update cannot compute it before; such
    units stay where they are.
    """
    moving = frozenset(moved)
    before = slab_holders(switch.plan, layers)
    able = [set(holders) for holders in before]
    for slab, devices in switch.joiners.items():
        able[slab].update(devices)
    cuts = sorted({s.start for p in (switch.plan, switch.next_plan) for s in p.stages})
    ends = [*cuts[1:], switch.plan.num_units]
    stages, table = [], []
    for start, stop in zip(cuts, ends, strict=True):
        old, new = _stage_of(switch.plan, start), _stage_of(switch.next_plan, start)
        slabs = {s for u in range(start, stop) for s in layers.units[u].slabs}
        can = set.intersection(*(able[s] for s in slabs))
        row = [
            target if micro_batch in moving and target in can else device
            for micro_batch, (device, target) in enumerate(
                zip(old_route[old], new_route[new], strict=True)
            )
        ]
        group = {*switch.plan.stages[old].group, *row}
        stages.append(Stage(start, stop, tuple(sorted(group))))
        table.append(tuple(row))
    return Migration(Plan(tuple(stages), switch.plan.o_plan), tuple(table))


def _stage_of(plan: Plan, unit: int) -> int:
    return next(n for n, s in enumerate(plan.stages) if s.start <= unit < s.stop)
