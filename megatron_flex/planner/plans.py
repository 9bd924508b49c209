"""Between groups of elements (what the searches know) and plans of units."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megatron_flex.planner.cost import Group
from megatron_flex.planner.plan import Plan, PlanError, Stage
from megatron_flex.planner.tables import Tables


def plan_of(t: Tables, groups: Sequence[Group]) -> Plan:
    """The plan in which each group holds its chunks."""
    stages = [
        Stage(t.points[begin], t.points[end], group.devices)
        for group in groups
        for begin, end in group.chunks
    ]
    return Plan(tuple(sorted(stages, key=lambda s: s.start)))


def groups_of(t: Tables, plan: Plan) -> tuple[Group, ...]:
    """The groups of a plan: devices that hold the same stages, in order of their first stage.

    Raises :class:`PlanError` when a stage begins inside an element, or a device is not there.
    """
    return _groups(t.points, t.num_devices, plan.stages)


@lru_cache(maxsize=4096)
def _groups(
    points: tuple[int, ...], num_devices: int, stages: tuple[Stage, ...]
) -> tuple[Group, ...]:
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
            if device >= num_devices:
                raise PlanError(
                    f"stage {number} ({stage}) is on device {device}, which is not there"
                )
            holders.setdefault(device, []).append(number)
    together: dict[tuple[int, ...], list[int]] = {}
    for device, held in holders.items():
        together.setdefault(tuple(held), []).append(device)
    groups = []
    for numbers, devices in sorted(together.items()):
        chunks = tuple((element[stages[n].start], element[stages[n].stop]) for n in numbers)
        replicas = tuple(tuple(sorted(stages[n].group)) for n in numbers)
        own = tuple(sorted(devices))
        groups.append(Group(chunks, own, () if all(r == own for r in replicas) else replicas))
    return tuple(groups)
