"""1F1B (PipeDream-Flush, Megatron-LM): after the warm-up, one forward, one backward in turn.

No more forwards in flight than keep the pipeline full, so memory does not grow with the number
of micro-batches. Where the plan is not an even straight pipeline, the rule is the same: after a
backward a forward, if one is there and within the limits, and after a forward a backward. (With
backward first always, backwards that come in a burst go in a burst, and the next stage starves.)
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


def warm_up(problem: Problem) -> tuple[int, ...]:
    """Forwards of a replica of each stage before its first backward.

    Stages - s of stage s in an even straight pipeline, else what may be in flight.
    """
    if is_even_straight(problem.plan):
        return tuple(range(len(problem.plan.stages), 0, -1))
    return in_flight_caps(problem)


def order(problem: Problem, turn: Sequence[int]) -> Orders | None:
    """The textbook's order of an even straight pipeline."""
    if not is_even_straight(problem.plan):
        return None
    return lagged_orders(problem, turn, warm_up(problem), [0] * len(problem.plan.stages))


ONE_F_ONE_B = Policy(
    "1f1b", split=False, rank=backward_first, limits=limits, alternate=True, order=order
)
