"""How many bytes of tensors a worker has in use on its device, and the most at one time.

On CUDA these are the allocator's own figures. PyTorch's CPU allocator has none, so the native
library counts what it takes from the C library and gives back (``kernels/src/memory_watch.cpp``):
every tensor of this process, whoever holds it, temporary results included. Memory outside that
allocator does not count: NumPy's arrays, memory maps, host arenas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from megatron_flex import native

ALLOCATOR = b"libc10.so"
"""The library with PyTorch's CPU allocator."""


@cache
def counts_cpu_memory() -> bool:
    """Begin to count this process's CPU tensors; whether that is possible.

    Only tensors that are made from now on count. Linux with glibc only; tried with one tensor.
    """
    if native.function("mflex_memory_watch")(ALLOCATOR) != 0:
        return False
    before = _cpu_bytes()
    tensor = torch.empty(1 << 20, dtype=torch.uint8)
    counted = _cpu_bytes() - before == tensor.nbytes
    del tensor
    return counted and _cpu_bytes() == before


def _cpu_bytes() -> int:
    return int(native.function("mflex_memory_current")())


@dataclass(frozen=True)
class Expected:
    """Bytes that one device is predicted to have in use at most in an iteration.

    Attributes:
        peak: up to the global norm; 0: nothing is predicted.
        updates: after it.
        budget: bytes that it may use; ``None``: what there is.
    """

    peak: float = 0.0
    updates: float = 0.0
    budget: float | None = None


class MemoryMeter:
    """Bytes in use on one device by this process, and the peak since a mark.

    ``available`` is false where nothing counts; then all figures are 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self.available = self._cuda or counts_cpu_memory()
        self._peak = 0
        self._aside = 0

    @property
    def current(self) -> int:
        """Bytes in use now."""
        if self._cuda:
            return int(torch.cuda.memory_allocated(self._device))
        return _cpu_bytes() if self.available else 0

    def begin(self, aside: int = 0) -> None:
        """Start a peak at what is in use now; ``aside``: bytes of it that are free for use."""
        self._most()
        self._aside = aside
        self._peak = self.current - aside

    def set_aside(self, aside: int) -> None:
        """From now on so many bytes in use are free for use, and do not count."""
        self._peak = self.peak
        self._aside = aside

    @property
    def peak(self) -> int:
        """The most bytes in use at one time since :meth:`begin`, without those set aside."""
        self._peak = max(self._peak, self._most() - self._aside)
        return self._peak

    def _most(self) -> int:
        """The most bytes in use at one time since the last call."""
        if not self.available:
            return 0
        if not self._cuda:
            return int(native.function("mflex_memory_peak")(1))
        most = int(torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        return most
