"""A simulated iteration as an object with the trainer's field names (docs/logging.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_flex.planner.build import Batch
from megatron_flex.planner.decision import Decision
from megatron_flex.planner.flops import iteration_flops
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.simulation import Prediction
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.sources import Lengths


def record_of(
    setting: Setting,
    number: int,
    lengths: Lengths,
    plan: Plan,
    batch: Batch,
    prediction: Prediction,
    *,
    swap: float = 0.0,
    stall: float = 0.0,
    switched: bool = False,
    decision: Decision | None = None,
) -> dict[str, Any]:
    """The object of one line.

    Beside the trainer's fields: ``balance``, seconds of perfect balance; ``longest``, the longest
    sample; ``device-memory``, peak bytes of every device; and how the iteration's seconds divide
    on the mean device that holds a stage: ``compute``, ``bubble-seconds`` (waits for other stages
    and messages), ``reduction`` (that nothing hides, the wait for other devices' included),
    ``update`` (likewise), ``host`` and ``switch-stall``.

    Args:
        number: of the iteration, from 0.
        swap: seconds that it waits for the host.
        stall: seconds of the switch before it.
        decision: where there was one.
    """
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    seconds = prediction.seconds + swap
    elapsed = seconds + stall
    line, placement = prediction.timeline, prediction.placement
    devices = plan.devices
    busy = float(np.mean([placement.busy(d) for d in devices]))
    until = placement.makespan
    record: dict[str, Any] = {
        "event": "iteration",
        "iteration": number + 1,
        "consumed_samples": (number + 1) * len(lengths),
        "elapsed": elapsed,
        "global_batch_size": len(lengths),
        "tokens": tokens,
        "padding": max(0, round(float(batch.tokens.sum())) - tokens),
        "tokens_per_second": tokens / elapsed,
        "flops": iteration_flops(setting.config, float(tokens), float(squares)),
        "longest": max(lengths),
        "plan": str(plan),
        "stages": len(plan.stages),
        "micro-batches": len(batch.tokens),
        "sliced-samples": len(batch.chains),
        "slices": sum(map(len, batch.chains)),
        "bubble": 1.0 - busy / line.norm,
        "balance": setting.balance(lengths),
        "predicted": seconds,
        "memory-predicted": float(max(prediction.device_bytes)),
        "memory-over-budget": sum(bool(b > setting.budget) for b in prediction.device_bytes),
        "device-memory": [round(float(b)) for b in prediction.device_bytes],
        "compute": busy,
        "bubble-seconds": until - busy,
        "reduction": line.norm - until,
        "update": prediction.seconds - line.norm,
        "host": swap,
    }
    if switched:
        record["switch-stall"] = stall
    if decision is not None:
        record["simulations"] = decision.simulations
        record["action"] = decision.action.label
    return record
