"""Between groups of slots and elements (what the searches know) and plans of devices and units."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megatron_flex.planner.cost import Group
from megatron_flex.planner.plan import Plan, PlanError, Stage
from megatron_flex.planner.tables import Tables


def plan_of(t: Tables, groups: Sequence[Group]) -> Plan:
    """The plan in which each group holds its chunks."""
    stages = [
        Stage(t.points[begin], t.points[end], tuple(t.devices[s] for s in group.slots))
        for group in groups
        for begin, end in group.chunks
    ]
    return Plan(tuple(sorted(stages, key=lambda s: s.start)))


def groups_of(t: Tables, plan: Plan) -> tuple[Group, ...]:
    """The groups of a plan: devices that hold the same stages, in order of their first stage.

    Raises :class:`PlanError` when a stage begins inside an element, or on a device without a slot.
    """
    return _groups(t.points, t.devices, plan.stages)


@lru_cache(maxsize=4096)
def _groups(
    points: tuple[int, ...], devices: tuple[int, ...], stages: tuple[Stage, ...]
) -> tuple[Group, ...]:
    slot = {device: i for i, device in enumerate(devices)}
    element = {unit: e for e, unit in enumerate(points)}
    holders: dict[int, list[int]] = {}
    for number, stage in enumerate(stages):
        for unit in (stage.start, stage.stop):
            if unit not in element:
                raise PlanError(
                    f"stage {number} ({stage}) is cut at unit {unit}, inside a layer: with"
                    " --flexpipe-unit layer stages begin at the first half of a layer"
                )
        for device in stage.group:
            if device not in slot:
                raise PlanError(
                    f"stage {number} ({stage}) is on device {device}, which is not there"
                )
            holders.setdefault(device, []).append(number)
    together: dict[tuple[int, ...], list[int]] = {}
    for device, held in holders.items():
        together.setdefault(tuple(held), []).append(slot[device])
    groups = []
    for numbers, slots in sorted(together.items()):
        chunks = tuple((element[stages[n].start], element[stages[n].stop]) for n in numbers)
        replicas = tuple(tuple(sorted(slot[d] for d in stages[n].group)) for n in numbers)
        own = tuple(sorted(slots))
        groups.append(Group(chunks, own, () if all(r == own for r in replicas) else replicas))
    return tuple(groups)
