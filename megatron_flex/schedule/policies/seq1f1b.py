"""Seq1F1B (Sun et al., 2024, arXiv:2406.03488): 1F1B over the slices of samples.

The slices of a sample go forward one after the other and back in reverse, samples first in first
out. With n slices a sample, a stage has n - 1 more forwards in its warm-up than under 1F1B. With m
samples of n slices of equal cost on p stages the bubble is ``(p - 1) / (n * m + p - 1)``, and the
first stage holds ``(n + p - 1) / n`` samples' activations. Where micro-batches have no slices it is
1F1B; where shapes are irregular the rule of 1F1B decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_flex.schedule.placement import Problem
from megatron_flex.schedule.policies.one_f_one_b import limits
from megatron_flex.schedule.policies.policy import Orders, Policy, backward_first
from megatron_flex.schedule.policies.straight import is_even_straight, lagged_orders


def order(problem: Problem, turn: Sequence[int]) -> Orders | None:
    """The paper's order of an even straight pipeline."""
    if not is_even_straight(problem.plan):
        return None
    last = {chain[-1]: chain for chain in problem.chains}
    chained = {m for chain in problem.chains for m in chain}
    back = [
        slice_
        for m in turn
        if m in last or m not in chained
        for slice_ in reversed(last.get(m, (m,)))
    ]
    slices = max(map(len, problem.chains), default=1)
    stages = len(problem.plan.stages)
    warm_up = [stages - s - 1 + slices for s in range(stages)]
    return lagged_orders(problem, turn, warm_up, [0] * stages, back)


SEQ1F1B = Policy(
    "seq1f1b", split=False, rank=backward_first, limits=limits, alternate=True, order=order,
    chains=True,
)  # fmt: skip
