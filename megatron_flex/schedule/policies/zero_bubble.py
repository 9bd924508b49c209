"""Zero-bubble schedules of straight pipelines (Qi et al., "Zero Bubble Pipeline Parallelism").

The weight half of a backward fills what would be a bubble. ZB-H1 holds no more activations than
1F1B's first device, ZB-H2 almost twice as many (then no device waits between its first and its
last operation). Where the plan is not an even straight pipeline, the rule decides: backward
before forward before weight gradient, within the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_flex.schedule.placement import Problem
from megatron_flex.schedule.policies.policy import (
    Limits,
    Orders,
    Policy,
    Shape,
    backward_first,
    pipeline_memory,
)
from megatron_flex.schedule.policies.straight import is_even_straight, lagged_orders


def one_pipeline(problem: Problem) -> Limits:
    """The memory of one pipeline's worth of micro-batches."""
    return Limits(Limits.none(problem).in_flight, pipeline_memory(problem))


def two_pipelines(problem: Problem) -> Limits:
    """Twice that memory."""
    memory = tuple(2 * m for m in pipeline_memory(problem))
    return Limits(Limits.none(problem).in_flight, memory)


def h1_order(problem: Problem, turn: Sequence[int]) -> Orders | None:
    """1F1B's warm-up; the weight gradient of stage s lags by s micro-batches."""
    if not _textbook(problem):
        return None
    stages = range(len(problem.plan.stages))
    return lagged_orders(problem, turn, [len(stages) - s for s in stages], list(stages))


def h2_order(problem: Problem, turn: Sequence[int]) -> Orders | None:
    """Warm-up until the first backward comes; the weight gradient lags twice as far."""
    if not _textbook(problem):
        return None
    stages = range(len(problem.plan.stages))
    warm_up = [2 * (len(stages) - s) - 1 for s in stages]
    return lagged_orders(problem, turn, warm_up, [2 * s for s in stages])


def _textbook(problem: Problem) -> bool:
    return problem.split and is_even_straight(problem.plan)


ZB_H1 = Policy("zb-h1", split=True, rank=backward_first, limits=one_pipeline, order=h1_order)
ZB_H2 = Policy("zb-h2", split=True, rank=backward_first, limits=two_pipelines, order=h2_order)

#: Our own: the rule alone, on any plan, with as much memory as the caller allows.
ZB = Policy("zb", split=True, rank=backward_first, limits=Limits.none, placement=Shape.ANY)
