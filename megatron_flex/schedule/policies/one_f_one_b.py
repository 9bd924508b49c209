"""1F1B (PipeDream-Flush, Megatron-LM): after the warm-up, one forward, one backward in turn.

No more forwards in flight than keep the pipeline full, so memory does not grow with the number
of micro-batches. Where a device holds several stages, the rule is: backward first, within the
same limits.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_flex.schedule.placement import Problem
from megatron_flex.schedule.policies.policy import (
    Limits,
    Orders,
    Policy,
    backward_first,
    in_flight_caps,
)
from megatron_flex.schedule.policies.straight import is_even_straight, lagged_orders


def limits(problem: Problem) -> Limits:
    """``K_s`` forwards in flight on each replica of stage s."""
    return Limits(tuple(map(float, in_flight_caps(problem))), Limits.none(problem).memory)


def order(problem: Problem, turn: Sequence[int]) -> Orders | None:
    """Stages - s warm-up forwards on stage s of an even straight pipeline."""
    stages = len(problem.plan.stages)
    if not is_even_straight(problem.plan):
        return None
    return lagged_orders(problem, turn, [stages - s for s in range(stages)], [0] * stages)


ONE_F_ONE_B = Policy("1f1b", split=False, rank=backward_first, limits=limits, order=order)
