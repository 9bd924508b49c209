"""Costs that decide the order of a program's operations: FLOPs, the same on every worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.flops import model_work, total_work
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.costs import OpCosts

BYTES_PER_ACTIVATION = 4
"""Only proportions matter here: the order of a program does not depend on the unit of memory."""


class Sized(Protocol):
    """A micro-batch, as far as its costs go."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""

    @property
    def squares(self) -> int:
        """Token pairs: the sum of squared lengths."""


def op_costs(config: ModelConfig, plan: Plan, micro_batches: Sequence[Sized]) -> OpCosts:
    """Closed-form costs (FLOPs) of every operation; transfers and updates are taken as free.

    The same on every worker and in every run, so all workers derive the same program.
    """
    works = model_work(config)
    sizes = [(float(m.tokens), float(m.squares)) for m in micro_batches]
    forward, backward_input, backward_weight, activation = [], [], [], []
    for stage in plan.stages:
        work = total_work(works[stage.start : stage.stop])
        again = [works[u] for u in plan.o_plan.recompute if stage.start <= u < stage.stop]
        repeated = total_work(again)
        forward.append(tuple(work.forward(*size) for size in sizes))
        split = [work.backward_split(*size) for size in sizes]
        more = [repeated.forward(*size) for size in sizes] if again else [0.0] * len(sizes)
        backward_input.append(tuple(i + m for (i, _), m in zip(split, more, strict=True)))
        backward_weight.append(tuple(w for _, w in split))
        held = BYTES_PER_ACTIVATION * config.hidden_size * (stage.stop - stage.start)
        activation.append(tuple(held * tokens for tokens, _ in sizes))
    free = (tuple(0.0 for _ in sizes),) * (len(plan.stages) - 1)
    return OpCosts(
        tuple(forward), tuple(backward_input), tuple(backward_weight), free, tuple(activation)
    )
