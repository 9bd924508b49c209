"""When a run has come apart: gradients that stay without a finite norm, weights of no use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch

from megatron_flex.checkpoint.options import OPTIMIZER

PATIENCE = 5
"""Iterations in a row without a finite gradient norm after which a run ends."""
LARGEST = math.sqrt(torch.finfo(torch.float32).max)
"""Weights beyond this have no square in single precision, so no norm and no layer takes them."""


class DivergedError(RuntimeError):
    """Training cannot go on from its state; the message says from where it can."""


class Divergence:
    """Counts iterations whose gradient norm was not finite, in a row.

    Each such iteration is skipped. One may be an accident; weights that are not finite make all
    that follow so.
    """

    def __init__(self) -> None:
        self._row = 0

    @property
    def suspected(self) -> bool:
        """Whether the last iteration had no finite norm: the weights may be of no use."""
        return self._row > 0

    def add(self, iteration: int, *, finite: bool, advice: Callable[[], str]) -> None:
        """Count an iteration; raises :class:`DivergedError` after :data:`PATIENCE` in a row."""
        self._row = 0 if finite else self._row + 1
        if self._row >= PATIENCE:
            raise DivergedError(
                f"the gradient norm was not finite in {PATIENCE} iterations in a row (up to"
                f" {iteration}), and none of them was an update: {advice()}"
            )


def usable(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether all of a checkpoint's tensors are finite, and weights not beyond :data:`LARGEST`.

    Moments may be as large as their type allows.
    """
    return all(
        _within(t.detach(), math.inf if name.startswith(OPTIMIZER) else LARGEST)
        for name, t in tensors.items()
        if t.is_floating_point() and t.numel()
    )


def _within(tensor: torch.Tensor, limit: float) -> bool:
    bounds: Iterable[torch.Tensor] = tensor.aminmax()  # both are NaN where one element is
    return all(abs(x) < limit for x in map(float, bounds))
