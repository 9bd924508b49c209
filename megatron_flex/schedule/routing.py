"""Which replica of each stage runs which micro-batch.

Stages of equal data-parallel degree share one partition of the micro-batches, so replicas are
paired stably from stage to stage (few pairs of devices talk), and a micro-batch that meets a
device again, in a V or on neighbouring stages of one group, stays on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.costs import OpCosts

Route = tuple[tuple[int, ...], ...]


def partition(work: Sequence[float], parts: int) -> tuple[int, ...]:
    """Split micro-batches into ``parts`` of nearly equal work (longest first, least loaded part).

    Returns the part of each micro-batch. Equal micro-batches are dealt in turn, so that all
    replicas have something to do early. The fullest part is at most 4/3 of the least possible.
    """
    if parts == 1:
        return (0,) * len(work)
    part = [0] * len(work)
    least = [(0.0, 0, p) for p in range(parts)]  # a heap: load, micro-batches, part
    for micro_batch in sorted(range(len(work)), key=lambda m: (-work[m], m)):
        load, count, best = least[0]
        part[micro_batch] = best
        heapq.heapreplace(least, (load + work[micro_batch], count + 1, best))
    return tuple(part)


def route(plan: Plan, costs: OpCosts, chains: Sequence[Sequence[int]] = ()) -> Route:
    """``route[stage][micro_batch]`` is the device that runs it; deterministic.

    Each micro-batch goes to one replica of every stage, balanced by forward plus backward time; all
    of a chain go to the same.
    Raises ``ValueError`` when the costs are for another number of stages.
    """
    if costs.num_stages != len(plan.stages):
        raise ValueError(
            f"the plan '{plan}' has {len(plan.stages)} stages, the costs are for {costs.num_stages}"
        )
    total = list(costs.totals)
    for chain in chains:
        total[chain[0]] = sum(total[m] for m in chain)
    leads = {m: chain[0] for chain in chains for m in chain}
    alone = [m for m in range(len(total)) if leads.get(m, m) == m]
    lead = np.array([leads.get(m, m) for m in range(len(total))])
    partitions: dict[int, NDArray[np.int64]] = {}
    slots: dict[int, dict[int, int]] = {}  # degree -> device -> part of the partition
    table = []
    for stage_ in plan.stages:
        degree = len(stage_.group)
        if degree not in partitions:
            parts = np.zeros(len(total), dtype=np.int64)
            parts[alone] = partition([total[m] for m in alone], degree)
            partitions[degree] = parts[lead]
        known = slots.setdefault(degree, {})
        seats = _seats(stage_.group, known)
        known.update({device: seat for seat, device in enumerate(seats)})
        table.append(tuple(np.array(seats)[partitions[degree]].tolist()))
    return tuple(table)


def _seats(group: tuple[int, ...], known: dict[int, int]) -> list[int]:
    """The device of each part: devices keep the part they had, the others fill the gaps."""
    seats = [-1] * len(group)
    rest = []
    for device in group:
        seat = known.get(device, -1)
        if seat >= 0 and seats[seat] < 0:
            seats[seat] = device
        else:
            rest.append(device)
    free = iter(rest)
    return [next(free) if device < 0 else device for device in seats]


def check_route(plan: Plan, table: Route, num_micro_batches: int) -> None:
    """Raise ``ValueError`` unless every micro-batch has one holder of every stage."""
    if len(table) != len(plan.stages):
        raise ValueError(f"the route has {len(table)} stages, the plan {len(plan.stages)}")
    for number, (row, stage) in enumerate(zip(table, plan.stages, strict=True)):
        if len(row) != num_micro_batches:
            raise ValueError(
                f"the route of stage {number} names {len(row)} micro-batches of {num_micro_batches}"
            )
        strangers = set(row) - set(stage.group)
        if strangers:
            raise ValueError(
                f"the route sends micro-batches of stage {number} to device {min(strangers)},"
                f" which does not hold it ({stage})"
            )
