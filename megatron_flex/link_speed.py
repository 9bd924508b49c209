"""Measures links: two messages of different size give latency and bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.cluster.cluster import Link

SMALL, LARGE = 1 << 10, 1 << 24
"""Bytes of the two messages."""
REPEATS = 9


def host_link(device: torch.device) -> Link:
    """Copies between the device and (pinned) host memory, the slower way."""
    times = []
    for size in (SMALL, LARGE):
        host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        there = torch.empty(size, dtype=torch.uint8, device=device)
        ways = []
        for source, target in ((host, there), (there, host)):
            samples = []
            for _ in range(REPEATS):
                wait(device)
                begin = time.perf_counter()
                target.copy_(source, non_blocking=True)
                wait(device)
                samples.append(time.perf_counter() - begin)
            ways.append(statistics.median(samples))
        times.append(max(ways))
    return link(times)


def there_and_back(
    first: bool, peer: int, device: torch.device, barrier: Callable[[], object]
) -> list[float]:
    """Seconds of a small and a large message between two workers of the default group.

    There and back, so that the clock of one process is enough. Both call it, the one with ``first``
    sends first; ``barrier`` waits for the other.
    """
    times = []
    for size in (SMALL, LARGE):
        data = torch.zeros(size, dtype=torch.uint8, device=device)
        samples = []
        for _ in range(REPEATS):
            barrier()
            wait(device)
            begin = time.perf_counter()
            _turn(first, data, peer)
            wait(device)
            samples.append((time.perf_counter() - begin) / 2)
        times.append(statistics.median(samples))
    return times


def _turn(first: bool, data: Tensor, peer: int) -> None:
    for sends in (first, not first):
        (dist.send if sends else dist.recv)(data, peer)


def link(times: Sequence[float]) -> Link:
    """From the seconds of a small and a large message."""
    small, large = times
    return Link((LARGE - SMALL) / max(large - small, 1e-9), small)


def wait(device: torch.device) -> None:
    """For what a GPU still does."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
