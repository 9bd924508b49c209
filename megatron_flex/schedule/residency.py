"""What is on a device at a time, as far as the instruction lists decide it.

Workers act by these rules, and the memory model counts by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_flex.planner.plan import OPlan, Plan
from megatron_flex.schedule.instructions import Compute, Forward, Instruction

POSTED = 4
"""Receives that a worker posts ahead. Their buffers are activations: enough to hide latency, few in
memory."""
WINDOW = 2
"""Slabs whose optimizer state is on the device at a time, of those whose state is on the host."""

Key = tuple[int, int]
"""Stage and micro-batch: one pass."""


def at_once(o_plan: OPlan) -> frozenset[int]:
    """Units whose weight half runs within the input half of a split backward.

    What recompute or the host brought back would else have to stay until the weight half. The
    embedding keeps nothing, so there is nothing to bring back.
    """
    return frozenset((*o_plan.recompute, *o_plan.activations)) - {0}


@dataclass(frozen=True)
class Travels:
    """Saved activations that go to the host on one device.

    Attributes:
        passes: those whose activations leave when the next operation begins.
        back: for an operation, the passes whose activations begin to return when it begins.
    """

    passes: frozenset[Key] = frozenset()
    back: dict[Compute, Key] = field(default_factory=dict)


def travels(instructions: Sequence[Instruction], plan: Plan) -> Travels:
    """Which passes' activations travel under the plan's O_plan.

    Only where there is time between the forward and the backward: one operation in which they are
    away, after the one that follows the forward and before the one in which they return.
    """
    units = plan.o_plan.activations
    stages = {
        number
        for number, stage in enumerate(plan.stages)
        if any(stage.start <= unit < stage.stop for unit in units)
    }
    if not stages:
        return Travels()
    computes = [i for i in instructions if isinstance(i, Compute)]
    begun: dict[Key, int] = {}
    passes: set[Key] = set()
    back: dict[Compute, Key] = {}
    for number, op in enumerate(computes):
        key = op.stage, op.micro_batch
        if op.stage not in stages:
            continue
        if isinstance(op, Forward):
            begun[key] = number
        elif key in begun and number - begun.pop(key) > 2:  # its first backward operation
            passes.add(key)
            back[computes[number - 1]] = key
    return Travels(frozenset(passes), back)
