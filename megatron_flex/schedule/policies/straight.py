"""The orders of straight pipelines (one stage a device): warm-up forwards, then one by one.

After its warm-up a device repeats (backward, weight gradient of an earlier micro-batch, forward).
1F1B, ZB-H1 and ZB-H2 differ in the number of warm-up forwards and in how far the weight gradient
lags behind the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.operations import OpKind
from megatron_flex.schedule.placement import Problem
from megatron_flex.schedule.policies.policy import Orders


def is_even_straight(plan: Plan) -> bool:
    """Whether every device holds one stage, and all stages have the same degree."""
    return len(plan.devices) == sum(plan.degrees) and len(set(plan.degrees)) == 1


def lagged_orders(
    problem: Problem,
    turn: Sequence[int],
    warm_up: Sequence[int],
    lag: Sequence[int],
    back: Sequence[int] | None = None,
) -> Orders:
    """Order of each device; ``warm_up`` and ``lag`` are counts for each stage.

    ``lag`` only matters where the backward is split. ``back``: the order of the backwards, if it is
    not ``turn``.
    """
    back = turn if back is None else back
    split = problem.split
    orders: list[tuple[int, ...]] = [()] * problem.num_devices
    for stage, placed in enumerate(problem.plan.stages):
        for device in placed.group:
            own = [m for m in turn if problem.route[stage][m] == device]
            forwards = _codes(problem, OpKind.FORWARD, stage, own)
            returning = [m for m in back if problem.route[stage][m] == device]
            backwards = _codes(problem, OpKind.BACKWARD, stage, returning)
            weights = _codes(problem, OpKind.WEIGHT, stage, returning) if split else []
            ahead = min(warm_up[stage], len(own))
            order = forwards[:ahead]
            for i, backward in enumerate(backwards):
                order.append(backward)
                if split and i >= lag[stage]:
                    order.append(weights[i - lag[stage]])
                order.extend(forwards[ahead + i : ahead + i + 1])
            if split:
                order.extend(weights[max(0, len(own) - lag[stage]) :])
            orders[device] = tuple(order)
    return tuple(orders)


def _codes(problem: Problem, kind: OpKind, stage: int, own: list[int]) -> list[int]:
    base = problem.encode(kind, stage, 0)
    return [base + m for m in own]
