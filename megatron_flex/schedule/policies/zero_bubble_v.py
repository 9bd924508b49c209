"""ZB-V (Qi et al., "Pipeline Parallelism with Controllable Memory"): two stages a device, in a V.

Device i holds stages i and 2p - 1 - i. The last device holds both middle stages, so the first
backward starts at once where the last forward ends, and all devices hold the same memory: that of
1F1B's first device. The order is the published one: every device fills its warm-up with forwards,
repeats (forward, input, weight) of both stages, and cools down with the input halves first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import length_hint

from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.operations import OpKind
from megatron_flex.schedule.placement import Problem
from megatron_flex.schedule.policies.policy import Orders, Policy, Shape, backward_first
from megatron_flex.schedule.policies.zero_bubble import one_pipeline

FORWARD, INPUT, WEIGHT = OpKind.FORWARD, OpKind.BACKWARD, OpKind.WEIGHT


def is_v(plan: Plan) -> bool:
    """Whether stage i and the i-th from the end are on the same group, all of one degree."""
    groups = [s.group for s in plan.stages]
    half = len(groups) // 2
    return (
        len(groups) % 2 == 0
        and groups == groups[::-1]
        and len(plan.devices) == sum(plan.degrees[:half])
        and len(set(plan.degrees)) == 1
    )


def v_order(problem: Problem, turn: Sequence[int]) -> Orders | None:
    """The published order for every device of a V."""
    plan = problem.plan
    if not (problem.split and is_v(plan)):
        return None
    half = len(plan.stages) // 2
    orders: list[tuple[int, ...]] = [()] * problem.num_devices
    for number in range(half):
        for device in plan.stages[number].group:
            own = [m for m in turn if problem.route[number][m] == device]
            orders[device] = _device_order(problem, own, number, half)
    return tuple(orders)


def _device_order(problem: Problem, own: list[int], number: int, half: int) -> tuple[int, ...]:
    """Order of the ``number``-th device of ``half`` in a V."""
    down, up = number, 2 * half - 1 - number
    order: list[int] = []
    left: dict[tuple[OpKind, int], Iterator[int]] = {}
    for kind in OpKind:
        for stage in (down, up):
            base = problem.encode(kind, stage, 0)
            left[kind, stage] = iter([base + m for m in own])

    def put(*steps: tuple[OpKind, int]) -> bool:
        """The next micro-batch of each of these; whether there was any."""
        before = len(order)
        for step in steps:
            order.extend(islice(left[step], 1))
        return len(order) > before

    for _ in range(2 * (half - number) - 1):
        put((FORWARD, down))
    for _ in range(number):
        put((FORWARD, up), (FORWARD, down))
    for _ in range(half - number):
        put((FORWARD, up), (INPUT, up), (WEIGHT, up))
    forwards = 2 * len(own) - sum(map(length_hint, (left[FORWARD, down], left[FORWARD, up])))
    while forwards < 2 * len(own):
        forwards += put((FORWARD, down))
        put((INPUT, down), (WEIGHT, down))
        forwards += put((FORWARD, up))
        put((INPUT, up), (WEIGHT, up))
    for _ in range(number):
        put((INPUT, down), (INPUT, up))
    for _ in range(half - number):
        put((INPUT, down), (WEIGHT, down))
    for step in ((WEIGHT, up), (WEIGHT, down)):
        order.extend(left[step])
    return tuple(order)


ZB_V = Policy(
    "zb-v", split=True, rank=backward_first, limits=one_pipeline, placement=Shape.V, order=v_order
)
