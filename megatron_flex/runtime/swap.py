"""Optimizer state that lives in host memory: onto the device before its update, and back after it.

A bounded number of slabs is on the device at a time. On CUDA copies run on a stream of their own;
for CPU workers in a thread, without the interpreter's lock. Either way the next slab comes, and the
one before goes, while one is updated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_flex.runtime.background import submit
from megatron_flex.runtime.slab import Slab
from megatron_flex.schedule.residency import WINDOW


class _Copies:
    """Copies that run beside the work of the calling thread, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> Future[None] | torch.cuda.Event:
        """Begin to copy; the work queued so far comes first."""
        if self._stream is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "swap")
            return submit(self._pool, _copy, source, target)
        self._stream.wait_stream(torch.cuda.current_stream(target.device if target.is_cuda
                                                           else source.device))  # fmt: skip
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        for tensor in (source, target):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        return event

    def await_(self, copy: Future[None] | torch.cuda.Event) -> None:
        """Let what follows in the calling thread come after a copy."""
        if isinstance(copy, Future):
            copy.result()
        else:
            torch.cuda.current_stream().wait_event(copy)


@torch.no_grad()
def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


class OptimizerSwap:
    """The swaps of one worker, for the updates of an iteration in their order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = _Copies(device)
        self._order: deque[Slab] = deque()
        self._in: dict[int, tuple[torch.Tensor, Future[None] | torch.cuda.Event]] = {}
        self._out: deque[tuple[torch.Tensor, Future[None] | torch.cuda.Event]] = deque()

    def begin(self, slabs: Iterable[Slab]) -> None:
        """Begin to bring in the state of the first of ``slabs``; all come in this order."""
        self._order = deque(s for s in slabs if s.offloaded and s.layout.numel)
        self._fetch()

    def take(self, slab: Slab) -> torch.Tensor:
        """The state that an update of ``slab`` needs, on the device; do not keep it."""
        brought, copy = self._in[slab.index]
        self._copies.await_(copy)
        return brought

    def give(self, slab: Slab) -> None:
        """Begin to copy it back after the update, and to bring in what comes next."""
        brought, _ = self._in.pop(slab.index)
        self._out.append((brought, self._copies.begin(brought, slab.swapped)))
        del brought
        self._fetch()

    def settle(self) -> None:
        """Wait until everything is back in host memory. What was brought in for nothing goes."""
        self._order.clear()
        for _, copy in self._in.values():
            self._end(copy)
        self._in.clear()
        while self._out:
            self._end(self._out.popleft()[1])

    def _fetch(self) -> None:
        while self._order:
            while len(self._in) + len(self._out) >= WINDOW:
                if not self._out:
                    return
                self._end(self._out.popleft()[1])
            slab = self._order.popleft()
            source = slab.swapped
            target = torch.empty(source.numel(), device=self._device)
            self._in[slab.index] = (target, self._copies.begin(source, target))

    def _end(self, copy: Future[None] | torch.cuda.Event) -> None:
        if isinstance(copy, Future):
            copy.result()
        else:
            copy.synchronize()
