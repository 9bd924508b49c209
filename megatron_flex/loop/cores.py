"""The processor cores of a server, and what shares them."""

from __future__ import annotations

import os

import torch

from megatron_flex.planner.pace import CROWDED_PART, PART
from megatron_flex.runtime.world import server_size


def crowding(world_size: int) -> float:
    """How many workers' threads share a core, at least one."""
    if torch.cuda.is_available():
        return 1.0
    return max(1.0, _threads(world_size) / _cores())


def planning_part(world_size: int) -> float:
    """The part of an iteration for the decision that is made meanwhile."""
    return PART if _threads(world_size) < _cores() else CROWDED_PART


def _threads(world_size: int) -> int:
    """That train on this server; a worker with a GPU needs one to feed it."""
    each = 1 if torch.cuda.is_available() else torch.get_num_threads()
    return server_size(world_size) * each


def _cores() -> int:
    return len(os.sched_getaffinity(0))
