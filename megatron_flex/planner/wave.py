"""A second estimate for fused backwards: two waves through the stages of a straight pipeline.

The closed form of :mod:`cost` adds up stages as if micro-batches were alike and replicas began at
one time. A wave takes every micro-batch through the stages in order. A replica runs K forwards,
then in turn the backward of the oldest micro-batch and a forward; a backward is there as soon as
its micro-batch, alone, has been to the end and back. That knows what forwards wait for and not
what backwards wait for, so a second wave goes from the end of the iteration to its begin, where the
two have changed places. Where that order is the schedule's, in even pipelines, neither is above the
simulation, and the larger counts; elsewhere the schedule may do better than the order, and their
mean is near it (docs/planner.md has the figures).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_flex.planner.tables import Array
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.routing import Route


def wave_seconds(costs: OpCosts, table: Route, ahead: Sequence[int], fixed: bool) -> float:
    """The makespan of a straight pipeline, seconds, without reductions and updates.

    Args:
        table: ``table[stage][micro_batch]`` is the device that runs it.
        ahead: K: for each stage, forwards of a replica before its first backward.
        fixed: the schedule keeps the waves' order.
    """
    forward, backward = costs.forward, costs.backward_input + costs.backward_weight
    wires = np.zeros_like(forward)  # into each stage
    wires[1:] = costs.transfer
    there = _wave(forward, backward, wires, table, ahead)
    back = _wave(
        backward[:, ::-1], forward[:, ::-1], wires[:, ::-1], [row[::-1] for row in table], ahead
    )
    alone = float((forward + backward + 2.0 * wires).sum(axis=0).max())
    return max(max(there, back) if fixed else 0.5 * (there + back), alone)


def _wave(
    forward: Array, backward: Array, wires: Array, table: Sequence[Sequence[int]],
    ahead: Sequence[int],
) -> float:  # fmt: skip
    """One wave; arrays are ``[stages, micro-batches]`` in the order of entry."""
    before = np.cumsum(backward + wires, axis=0) - backward  # of a backward from here to the start
    pair = forward + backward + 2.0 * wires
    after = np.cumsum(pair[::-1], axis=0)[::-1] - pair  # from here to the end and back
    returns = after + backward
    ready: list[float] = [0.0] * forward.shape[1]
    slowest = 0.0
    for stage, devices in enumerate(table):
        most = ahead[stage]
        f: list[float] = forward[stage].tolist()
        b: list[float] = backward[stage].tolist()
        wire: list[float] = wires[stage].tolist()
        back: list[float] = returns[stage].tolist()
        done: dict[int, list[float]] = {}  # of each replica: ends of its forwards
        own: dict[int, list[int]] = {}
        for m, device in enumerate(devices):
            ends, mine = done.setdefault(device, []), own.setdefault(device, [])
            begin = ready[m] + wire[m]
            if len(ends) >= most:
                oldest = mine[-most]
                begin = max(begin, ends[-1] + b[oldest], ends[-most] + back[oldest])
            elif ends:
                begin = max(begin, ends[-1])
            ready[m] = begin + f[m]
            ends.append(ready[m])
            mine.append(m)
        for device, ends in done.items():
            mine = own[device]
            end = ends[-1] + sum(b[m] for m in mine[-most:])
            end = max(end, *(e + back[m] for e, m in zip(ends, mine, strict=True)))
            slowest = max(slowest, end + float(before[stage, mine].min()))
    return slowest
