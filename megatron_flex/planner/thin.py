"""Large clusters, planned as one device of every so many.

Where there are far more devices than a pipeline has use for, every stage has many replicas. So
``width`` neighbouring devices are taken as one: they hold the same stages, and each of them belongs
to a pipeline of its own, which has its part of the batch. One of these pipelines is planned, that
with the most to do; the others are about as long. So planning takes as long for 4,096 devices as
for a few dozen.

A device of such a thin plan is like any other, but that its gradients are summed over ``width``
times as many replicas (:attr:`PlannerOptions.width`), and that with a sharded optimizer it has as
much less of its state. What is given up are groups of devices that are no multiple of the width.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_flex.cluster.cluster import Cluster
from megatron_flex.cluster.profile import Profile
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.planner.decision import Decision, Predicted
from megatron_flex.planner.plan import Plan, Stage

MOST = 64
"""Devices that are planned for one by one on a large cluster."""


def width_of(cluster: Cluster, above: int, degrees: Iterable[int] = ()) -> int:
    """How many devices of a cluster are planned as one: 1 up to ``above`` or :data:`MOST` devices.

    ``degrees``: of stages that must still be possible; where no width allows them it is 1.
    """
    world, per_server = cluster.world_size, cluster.devices_per_server
    if world <= min(above, MOST):
        return 1
    wanted = tuple(degrees)
    for width in range(-(-world // MOST), world + 1):
        whole = width % per_server == 0 or per_server % width == 0
        if whole and world % width == 0 and not any(d % width for d in wanted):
            return width
    return 1


def thin_cluster(cluster: Cluster, width: int) -> Cluster:
    """The cluster of one device of every ``width``: parts of servers, or several together."""
    per_server = cluster.devices_per_server
    if width <= per_server:
        return cluster.grouped(width)
    servers = cluster.world_size // width
    return replace(cluster, servers=servers, devices_per_server=1, intra=cluster.inter)


def thin_profile(profile: Profile, cluster: Cluster, width: int) -> Profile:
    """The profile on it: where servers are taken together, no link is inside one."""
    if width <= cluster.devices_per_server:
        return profile
    links = {name: link for name, link in profile.links.items() if name != "intra"}
    return replace(profile, links=links)


def thin_plan(plan: Plan, width: int) -> Plan | None:
    """The plan of one device of every ``width``; ``None`` where they do not hold the same."""
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    for stage in plan.stages:
        if stage.group not in groups:
            parts = tuple(dict.fromkeys(d // width for d in stage.group))
            if _wide(parts, width) != stage.group:
                return None
            groups[stage.group] = parts
    return _regrouped(plan, groups)


def wide_plan(plan: Plan, width: int) -> Plan:
    """The plan of all devices that a thin one stands for."""
    return _regrouped(plan, {s.group: _wide(s.group, width) for s in plan.stages})


def wide_decision(decision: Decision, width: int) -> Decision:
    """A decision as one for all devices."""

    def wide(found: Predicted) -> Predicted:
        size = tuple(b for b in found.device_bytes for _ in range(width))
        return replace(found, device_bytes=size)

    current, second = decision.current, decision.runner_up
    return replace(
        decision,
        plan=wide_plan(decision.plan, width),
        predicted=wide(decision.predicted),
        current=None if current is None else wide(current),
        runner_up=None if second is None else (wide_plan(second[0], width), wide(second[1])),
    )


@lru_cache(maxsize=16)  # a window, the iteration before it, and some
def part(
    lengths: tuple[int, ...], width: int, cost: CostCoefficients, devices: int
) -> tuple[int, ...]:
    """The samples of a batch that fall to the pipeline with the most to do, of ``width`` alike.

    Dearest first to the one with the least so far (LPT: Graham 1969), as replicas have theirs.

    Args:
        devices: of one pipeline. A sample keeps them from sharing its work, so the longest one of
            a pipeline counts beside all that it has.
    """
    if width == 1:
        return lengths
    costs = [cost.of(n) for n in lengths]
    parts: list[list[int]] = [[] for _ in range(width)]
    least = [(0.0, number) for number in range(width)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, number = least[0]
        parts[number].append(i)
        heapq.heapreplace(least, (load + costs[i], number))
    loads = {number: load for load, number in least}
    known = [number for number in range(width) if parts[number]]

    def seconds(number: int) -> tuple[float, int]:
        return loads[number] / devices + costs[parts[number][0]], -number

    return tuple(lengths[i] for i in sorted(parts[max(known, key=seconds)]))


def _regrouped(plan: Plan, groups: Mapping[tuple[int, ...], tuple[int, ...]]) -> Plan:
    return replace(plan, stages=tuple(Stage(s.start, s.stop, groups[s.group]) for s in plan.stages))


def _wide(group: Sequence[int], width: int) -> tuple[int, ...]:
    return tuple(d * width + k for d in group for k in range(width))
