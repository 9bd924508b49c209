"""Copies between a slab's state and its entry in the arena, without the interpreter lock.

On the CPU they run in the calling thread. From and to a GPU they run on a stream of their own; the
thread waits for it, the GPU's other streams do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_flex import kernels, native
from megatron_flex.twinlayer.arena import LOST, Entry
from megatron_flex.twinlayer.errors import TwinError

_GROUP = 16
"""Chunks that go to a GPU at a time: what a single copy costs is paid for them together."""


class Side:
    """Where one thread's copies run."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def now(self) -> torch.cuda.Event | None:
        """What a copy must come after: the work that the calling thread has queued so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    @contextmanager
    def after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """Copies in this block come after ``event``, and have ended at the end of the block."""
        if self._stream is None or event is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(event)
            try:
                yield
            finally:
                self._stream.synchronize()


def keep(entry: Entry, state: Tensor) -> None:
    """Copy ``state`` in for recovery, with its checksum."""
    if state.device.type == "cpu":
        checksum = entry.save(state)
    else:
        entry.data.view(state.dtype).copy_(state, non_blocking=True)
        torch.cuda.current_stream(state.device).synchronize()
        checksum = native.function("mflex_twin_checksum")(
            entry.data.data_ptr(), entry.bytes, entry.chunk_bytes
        )
    entry.complete(checksum)


def restore(entry: Entry, state: Tensor) -> None:
    """Copy what was kept into ``state``."""
    state.copy_(entry.data.view(state.dtype))


def write(entry: Entry, state: Tensor, threads: int) -> None:
    """Copy ``state`` in, chunk by chunk."""
    kernels.write_chunks(
        state, entry.data.view(state.dtype), entry.flags, entry.version, entry.chunk_bytes, threads
    )


def read(entry: Entry, state: Tensor, timeout: float, threads: int) -> None:
    """Copy into ``state``, each chunk as soon as it is there; on a GPU, queue the copies.

    Raises :class:`TwinError` when one does not come within ``timeout`` seconds of waiting for it,
    or the writer has ended.
    """
    try:
        if state.device.type == "cpu":
            data = entry.data.view(state.dtype)
            kernels.read_chunks(
                data, state, entry.flags, entry.version, entry.chunk_bytes, timeout, threads
            )
        else:
            _read_to_device(entry, state, timeout)
    except (RuntimeError, TimeoutError) as error:
        if entry.state == LOST:
            raise TwinError(
                f"worker {entry.source} ended before it had handed over slab {entry.slab}"
            ) from error
        raise TwinError(f"slab {entry.slab} of worker {entry.source}: {error}") from error


def _read_to_device(entry: Entry, state: Tensor, timeout: float) -> None:
    flags, data = entry.flags, entry.data
    target = state.view(torch.uint8)
    for first in range(0, len(flags), _GROUP):
        last = min(first + _GROUP, len(flags))
        for chunk in range(first, last):
            address = flags.data_ptr() + 8 * chunk
            found = native.function("mflex_twin_wait")(address, entry.version, int(timeout * 1e9))
            if found != entry.version:
                why = f"did not come within {timeout:g} s" if found < entry.version else "is gone"
                raise TimeoutError(f"chunk {chunk} of {len(flags)} {why}")
        part = slice(first * entry.chunk_bytes, min(last * entry.chunk_bytes, entry.bytes))
        target[part].copy_(data[part], non_blocking=True)
