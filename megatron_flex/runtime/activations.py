"""Saved activations that go to the host's memory after their forward and return for the backward.

Autograd hands every tensor that it saves to a hook, which keeps its storage here. Between forward
and backward the storages of one pass travel together, through the segment-copy kernel and without
the interpreter's lock on the CPU, on a stream of their own on CUDA. The way out is waited for
before the next pass, which may need the memory; the way back runs beside the pass before the one
that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megatron_flex.kernels import SegmentCopy
from megatron_flex.runtime.background import submit
from megatron_flex.runtime.host_buffers import HostBuffers
from megatron_flex.schedule.residency import Key
from megatron_flex.schedule.shards import round_up

SMALLEST = 512
"""Bytes; what is smaller stays."""
_ALIGNMENT = 64


@dataclass(eq=False)
class _Storage:
    """The memory of saved tensors: on the device, or on the host."""

    bytes: int
    device: torch.UntypedStorage | None
    group: _Group
    offset: int = 0  # in the group's buffer on the host

    def get(self) -> torch.UntypedStorage:
        """The memory on the device; brings the whole group back if nobody has."""
        if self.device is None:
            self.group.owner.back(self.group.key)
        self.group.wait()
        assert self.device is not None
        return self.device


@dataclass(frozen=True)
class _Saved:
    """What autograd keeps instead of a tensor."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor."""
        memory = self.storage.get()
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory, self.offset, self.size, self.stride)


@dataclass(eq=False)
class _Group:
    """The storages of one pass.

    They are known weakly: a storage is gone when autograd has used all that lies in it.
    """

    key: Key
    owner: ActivationOffload
    storages: WeakValueDictionary[int, _Storage] = field(default_factory=WeakValueDictionary)
    buffer: Tensor | None = None
    moving: Future[None] | torch.cuda.Event | None = None

    def wait(self) -> None:
        """Let what follows come after the copy under way."""
        if isinstance(self.moving, Future):
            self.moving.result()
        elif self.moving is not None:
            torch.cuda.current_stream().wait_event(self.moving)
        self.moving = None


class ActivationOffload:
    """The activations of one worker that go to the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[Key, _Group] = {}
        self._buffers = HostBuffers(pinned=device.type == "cuda")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool: ThreadPoolExecutor | None = None

    def saving(
        self, key: Key, stay: Iterable[Tensor], stays: Callable[[int], bool] = lambda _: False
    ) -> AbstractContextManager[object]:
        """What autograd saves in this context belongs to the pass ``key``.

        ``stay``: tensors whose storages stay on the device: weights, and the unit's input.
        ``stays(address)``: whether a storage that begins there does, as keys of cut samples do.
        """
        group = self._groups.setdefault(key, _Group(key, self))
        own = {t.untyped_storage().data_ptr() for t in stay}

        def pack(tensor: Tensor) -> Tensor | _Saved:
            memory = tensor.untyped_storage()
            address = memory.data_ptr()
            if not tensor.is_floating_point() or memory.nbytes() < SMALLEST:
                return tensor
            if address in own or stays(address):
                return tensor
            storage = group.storages.get(address)
            if storage is None:
                storage = group.storages[address] = _Storage(memory.nbytes(), memory, group)
            return _Saved(
                storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
            )

        def unpack(saved: Tensor | _Saved) -> Tensor:
            return saved.tensor() if isinstance(saved, _Saved) else saved

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def away(self, key: Key) -> None:
        """Copy what the pass saved to the host, and free it on the device."""
        group = self._groups.get(key)
        if group is None or not group.storages:
            return
        storages = list(group.storages.values())
        total = 0
        for storage in storages:
            storage.offset = total
            total += round_up(storage.bytes, _ALIGNMENT)
        group.buffer = self._buffers.take(total)
        self._move(group, storages, out=True)
        group.wait()
        for storage in storages:
            storage.device = None

    def back(self, key: Key) -> None:
        """Begin to copy it to the device again."""
        group = self._groups.get(key)
        if group is None or group.buffer is None or group.moving is not None:
            return
        storages = list(group.storages.values())
        if all(s.device is not None for s in storages):
            return
        for storage in storages:
            storage.device = torch.UntypedStorage(storage.bytes, device=self._device)
        self._move(group, storages, out=False)

    def done(self, key: Key) -> None:
        """The backward of the pass has ended."""
        group = self._groups.pop(key, None)
        if group is not None and group.buffer is not None:
            group.wait()
            self._buffers.give(group.buffer)

    # ---- copies ------------------------------------------------------------------------------

    def _move(self, group: _Group, storages: list[_Storage], *, out: bool) -> None:
        assert group.buffer is not None
        tensors = []
        for storage in storages:
            assert storage.device is not None
            empty = torch.empty(0, dtype=torch.uint8, device=self._device)
            tensors.append(empty.set_(storage.device))
        offsets = [storage.offset for storage in storages]
        if self._stream is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "activations")
            run = SegmentCopy.gather if out else SegmentCopy.scatter
            group.moving = submit(self._pool, run, SegmentCopy(tensors, group.buffer, offsets), 1)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for tensor, offset in zip(tensors, offsets, strict=True):
                part = group.buffer[offset : offset + tensor.numel()]
                (part if out else tensor).copy_(tensor if out else part, non_blocking=True)
                # What leaves is waited for before it is freed: its memory can be had at once. What
                # returns may be freed unused.
                if not out:
                    tensor.record_stream(self._stream)
            group.moving = torch.cuda.Event()
            group.moving.record(self._stream)
