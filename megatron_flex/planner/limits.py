"""How much of a memory budget a plan may fill by what is predicted of it."""

from __future__ import annotations

from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.memory import boundary_bytes
from megatron_flex.planner.tensor import ALONE, TensorParallel

MARGIN = 0.02
"""Part of the budget that plans leave free, for what the model of memory does not know."""
UNTAKEN = 2
"""Messages of the largest micro-batch for which there is room besides: a peer may be slow to take
them, and nothing tells when."""


def room_for_messages(
    config: ModelConfig, stages: int, tokens: float, tensor: TensorParallel = ALONE
) -> float:
    """Bytes of the messages that a peer may not have taken; ``tokens``: of the largest one."""
    return UNTAKEN * boundary_bytes(config, tensor) * tokens if stages > 1 else 0.0


def allowance(budget: float, room: float) -> float:
    """Bytes of a budget that the predicted peak of a device may have; ``room``: for messages."""
    return (1.0 - MARGIN) * budget - room
