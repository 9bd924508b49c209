"""Does the run fit at all? Asked before anything is allocated, answered with bytes and flags.

What is counted is a lower bound: parameters, gradients and optimizer state of every unit that a
worker holds, and the activations of the longest sample alone. A run that needs more than there is
would end in the middle, at the first long sample; a run that passes may still be too tight, which
is for the planner to judge.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch

from megatron_flex.data.batches import BatchSource
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.memory import tied_state, unit_memory
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.tensor import ALONE, TensorParallel
from megatron_flex.quantities import size
from megatron_flex.runtime.world import workers_per_gpu
from megatron_flex.schedule.shards import sharded_slabs
from megatron_flex.schedule.slabs import slab_holders


class MemoryLimitError(ValueError):
    """A run that cannot fit; the message has the bytes and the flags to change."""


def check_memory(
    model: ModelConfig,
    plan: Plan,
    source: BatchSource | None,
    longest: int,
    memory: int,
    tensor: TensorParallel = ALONE,
) -> None:
    """Raise :class:`MemoryLimitError` if some worker of ``plan`` can never run the longest sample.

    Args:
        source: what is trained on.
        longest: ``--max-sample-length``, the most that a sample can have, in tokens.
        memory: bytes that a worker may use, see :func:`memory_of_worker`.
        tensor: how workers share layers.
    """

    def needed(device: int, tokens: int) -> int:
        return device_bytes(model, plan, device, tokens, tensor)

    needs = {device: needed(device, longest) for device in plan.devices}
    if max(needs.values()) <= memory:
        return
    if source is not None:  # perhaps no sample is as long as it may be
        longest = max(int(lengths.max()) for lengths in source.all_lengths())
        needs = {device: needed(device, longest) for device in plan.devices}
    worst = max(needs, key=lambda device: needs[device])
    if needs[worst] <= memory:
        return
    state = needed(worst, 0)
    raise MemoryLimitError(
        f"worker {worst * tensor.size} needs at least {size(needs[worst])} for a sample of"
        f" {longest:,} tokens ({size(state)} for weights, gradients and optimizer, the rest for"
        f" activations), but has {size(memory)}: lower --max-sample-length (or leave long samples"
        " out with --overlong drop), recompute layers with --recompute-granularity, split optimizer"
        " state over replicas with --use-distributed-optimizer, or give layers to more workers with"
        " --pipeline-model-parallel-size or --flexpipe-plan"
    )


def device_bytes(
    model: ModelConfig, plan: Plan, device: int, tokens: int, tensor: TensorParallel = ALONE
) -> int:
    """The least that ``device`` needs to train on one sample of ``tokens`` tokens, in bytes.

    Of each of its workers, where these share layers.
    """
    memory, units = unit_memory(model, tensor), model.layers.units
    held = [
        units[number]
        for stage in plan.stages_of(device)
        for number in range(plan.stages[stage].start, plan.stages[stage].stop)
    ]
    tied, o = model.layers.tied_slab, plan.o_plan
    sharded, holders = sharded_slabs(plan, model.layers), slab_holders(plan, model.layers)

    def share(slab: int) -> float:
        """The part of a slab's optimizer state that is on the device."""
        return 1.0 / len(holders[slab]) if slab in sharded else float(slab not in o.optimizer)

    total = 0.0
    for unit in held:
        m = memory[unit.kind]
        total += m.state.total - m.state.optimizer * (1.0 - share(unit.index))
        kept = m.kept if unit.index in o.recompute else None
        total += tokens * (m.activation if kept is None else kept)
    if tied is not None and any(tied in u.slabs for u in held):
        state = tied_state(model, tensor)
        total += state.total - state.optimizer * (1.0 - share(tied))
    return int(total)


def memory_of_worker(device: torch.device) -> int:
    """Bytes that this worker may use: its share of its GPU's memory, or of the server's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // workers_per_gpu()
    total = psutil.virtual_memory().total
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups 2 and 1
        try:
            total = min(total, int(Path("/sys/fs/cgroup", name).read_text()))
        except (OSError, ValueError):
            continue
    return total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
