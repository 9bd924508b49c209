"""Interleaved 1F1B (Narayanan et al., 2021; Megatron-LM's virtual pipeline stages).

Device i of p holds stages i, i + p, i + 2p, ... Micro-batches go in groups of p: all of a group
through the device's first stage, then all through its second, and so on; their backwards likewise,
last stage first. The bubble is that of 1F1B divided by the number of stages on a device.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.operations import OpKind
from megatron_flex.schedule.placement import Problem
from megatron_flex.schedule.policies.one_f_one_b import limits
from megatron_flex.schedule.policies.policy import Orders, Policy, Shape, backward_first


def rounds(plan: Plan) -> int:
    """Stages on each device of an interleaved plan; 0 for another plan.

    All groups have the same degree, and are in turn the holders of the stages.
    """
    groups = [s.group for s in plan.stages]
    devices = len(dict.fromkeys(groups))
    if len(groups) % devices or groups != groups[:devices] * (len(groups) // devices):
        return 0
    straight = len(plan.devices) == sum(map(len, groups[:devices]))
    return len(groups) // devices if straight and len(set(plan.degrees)) == 1 else 0


def order(problem: Problem, turn: Sequence[int]) -> Orders | None:
    """Megatron-LM's order (``schedules.py``: ``forward_backward_pipelining_with_interleaving``)."""
    plan = problem.plan
    count = rounds(plan)
    if count < 2 or problem.split:
        return None
    devices = len(plan.stages) // count
    orders: list[list[int]] = [[] for _ in range(problem.num_devices)]
    for number in range(devices):
        for device in plan.stages[number].group:
            own = [m for m in turn if problem.route[number][m] == device]
            passes = [
                (m, chunk)
                for first in range(0, len(own), devices)
                for chunk in range(count)
                for m in own[first : first + devices]
            ]
            forwards = [
                problem.encode(OpKind.FORWARD, number + chunk * devices, m) for m, chunk in passes
            ]
            backwards = [
                problem.encode(OpKind.BACKWARD, number + (count - 1 - chunk) * devices, m)
                for m, chunk in passes
            ]
            ahead = min(len(passes), 2 * (devices - number - 1) + (count - 1) * devices)
            steps = forwards[:ahead]
            for forward, backward in zip(forwards[ahead:], backwards, strict=False):
                steps += [forward, backward]
            orders[device] = steps + backwards[len(passes) - ahead :]
    return orders


INTERLEAVED = Policy(
    "interleaved", split=False, rank=backward_first, limits=limits, alternate=True,
    placement=Shape.INTERLEAVED, order=order,
)  # fmt: skip
