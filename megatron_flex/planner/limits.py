"""How much of a memory budget a plan may fill by what is predicted of it."""

from __future__ import annotations

MARGIN = 0.02
"""Part of the budget that plans leave free, for what the model of memory does not know."""


def allowance(budget: float) -> float:
    """Bytes of a budget that the predicted peak of a device may have."""
    return (1.0 - MARGIN) * budget
