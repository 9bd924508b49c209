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
from megatron_flex.telemetry.record import LENGTH_PERCENTILES, LENGTHS_LISTED


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
    whole: Lengths = (),
) -> dict[str, Any]:
    """The object of one line.

    What the trainer measures is what was simulated here. Beside the trainer's fields there are
    ``longest``, the longest sample, and some of the seconds (docs/simulator.md).

    Args:
        number: of the iteration, from 0.
        swap: seconds that it waits for the host.
        stall: seconds of the switch before it.
        decision: where there was one.
        whole: samples of the batch, where ``lengths`` are only what falls to the devices that are
            simulated (:class:`~megatron_flex.simulator.sources.Part`).
    """
    every = whole or lengths
    tokens, squares = sum(every), sum(n * n for n in every)
    seconds = prediction.seconds + swap
    elapsed = seconds + stall
    memory = [float(size) for size in prediction.device_bytes]
    times = times_of(setting, lengths, plan, prediction)
    record: dict[str, Any] = {
        "event": "iteration",
        "iteration": number + 1,
        "consumed_samples": (number + 1) * len(every),
        "elapsed": elapsed,
        "global_batch_size": len(every),
        "tokens": tokens,
        "padding": setting.width * max(0, round(float(batch.tokens.sum())) - sum(lengths)),
        "tokens_per_second": tokens / elapsed,
        "flops": iteration_flops(setting.config, float(tokens), float(squares)),
        "longest": max(every),
        "plan": str(plan),
        "stages": len(plan.stages),
        "micro-batches": len(batch.tokens),
        "sliced-samples": len(batch.chains),
        "slices": sum(map(len, batch.chains)),
        "bubble": 1.0 - times["seconds-compute"] / times["seconds-to-norm"],
        "memory-measured": max(memory),
        "memory-over-budget": sum(size > setting.budget for size in memory),
        **times,
        "seconds-host": swap,
        "length-quantiles": np.percentile(every, LENGTH_PERCENTILES).round().astype(int).tolist(),
        "memory-by-worker": [round(size) for size in memory],
    }
    if len(lengths) <= LENGTHS_LISTED:
        record["lengths"] = list(lengths)
    if switched:
        record["switch-stall"] = stall
    if decision is not None:
        record["predicted"] = decision.predicted.seconds
        record["simulations"] = decision.simulations
        record["action"] = decision.action.label
        if switched:
            record["reason"] = decision.why
    return record


def times_of(
    setting: Setting, lengths: Lengths, plan: Plan, prediction: Prediction
) -> dict[str, float]:
    """Where the seconds go, means over the devices that hold a stage.

    A device that is free waits for its next operation's input: for a bubble until that is made, for
    the message from then on.
    """
    line, placement = prediction.timeline, prediction.placement
    senders = placement.problem.operations.senders()
    sent = np.where(senders >= 0, placement.finish[senders], -np.inf)
    busy, message = 0.0, 0.0
    devices = plan.devices
    for device in devices:
        order = placement.order[device]
        start, finish = placement.start[order], placement.finish[order]
        free = np.concatenate([[0.0], finish[:-1]])
        made = sent[order]
        waits = np.where(np.isfinite(made), start - np.maximum(free, made), 0.0)
        message += float(np.maximum(0.0, waits).sum())
        busy += placement.busy(device)
    mean = len(devices)
    return {
        "seconds-to-norm": line.norm,
        "seconds-compute": busy / mean,
        "seconds-bubble": placement.makespan - (busy + message) / mean,
        "seconds-message": message / mean,
        "seconds-reduce": line.norm - placement.makespan,
        "seconds-update": prediction.seconds - line.norm,
        "seconds-balanced": busy / setting.devices,
        "seconds-perfect": setting.balance(lengths),
    }
