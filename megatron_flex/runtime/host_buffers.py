"""Host memory for activations that are away, used again by passes of other sizes."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import torch
from torch import Tensor

_STEPS = 8
"""Sizes between two powers of two: what is asked for differs with every micro-batch."""


def rounded(size: int) -> int:
    """The size of the buffer that ``size`` bytes get: at most an eighth more."""
    step = 1 << max(0, size.bit_length() - _STEPS.bit_length())
    return -(-size // step) * step


class HostBuffers:
    """Buffers of bytes, as many as were ever in use at one time, none larger than the largest use.

    Args:
        pinned: for copies of a GPU. Else they are outside PyTorch's allocator, which stands for the
            device's memory on CPU workers.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[Tensor] = []  # by size

    def take(self, size: int) -> Tensor:
        """A buffer of at least ``size`` bytes: the smallest free one that is large enough.

        Where none is, a new one takes the place of the largest of those that are too small.
        """
        place = bisect_left(self._free, size, key=Tensor.numel)
        if place < len(self._free):
            return self._free.pop(place)
        if self._free:
            self._free.pop()
        return self._new(rounded(size))

    def give(self, buffer: Tensor) -> None:
        """It is free again."""
        insort(self._free, buffer, key=Tensor.numel)

    @property
    def free(self) -> int:
        """Bytes of the buffers that are free."""
        return sum(buffer.numel() for buffer in self._free)

    def _new(self, size: int) -> Tensor:
        if self._pinned:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(np.empty(size, dtype=np.uint8))
