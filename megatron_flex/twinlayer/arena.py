"""The memory that the manager shares with the workers of its server (kernels/twin/layout.h)."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_flex import kernels, native
from megatron_flex.twinlayer.errors import TwinError

MAGIC = 0x314E495754584C46
WRITING, COMPLETE, LOST = 1, 2, 3

_WORDS = ("state", "version", "checksum", "taken", "bytes", "chunk_bytes", "slab", "source")
_HEADER = 8 * len(_WORDS)
_PAGE = 4096


class Arena:
    """The mapped arena. ``memory``: ``[bytes]`` uint8, pinned where this worker has a GPU."""

    def __init__(self, descriptor: int, size: int, device: torch.device) -> None:
        """Map ``size`` bytes of ``descriptor``, which is closed."""
        try:
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)
        if self._load(0) != MAGIC:
            raise TwinError("the manager of host copies is of another version: build it again")
        self._pinned = device.type == "cuda"
        if self._pinned:
            try:
                kernels.register_host(self.memory)
            except RuntimeError as error:
                raise TwinError(
                    f"the GPU cannot use host copies of layers ({error}): give --flexpipe-no-twin,"
                    " and no --flexpipe-twin-snapshot"
                ) from error

    def close(self) -> None:
        """Use it no more; the memory goes with the last view of it."""
        if self._pinned:
            kernels.unregister_host(self.memory)
            self._pinned = False

    def commit(self, version: int) -> None:
        """Say that ``version`` is complete on all servers: older ones may be overwritten."""
        native.function("mflex_twin_raise")(self.memory.data_ptr() + 8, version)

    def entry(self, offset: int) -> Entry:
        """The entry that the manager placed at ``offset`` bytes."""
        words = self.memory[offset : offset + _HEADER].view(torch.int64).tolist()
        values = dict(zip(_WORDS, words, strict=True))
        return Entry(
            self,
            offset,
            version=values["version"],
            bytes=values["bytes"],
            chunk_bytes=values["chunk_bytes"],
            slab=values["slab"],
            source=values["source"],
        )

    def _load(self, offset: int) -> int:
        value: int = native.function("mflex_twin_load")(self.memory.data_ptr() + offset)
        return value


@dataclass(frozen=True)
class Entry:
    """Room for one slab's state: what its header says when the manager has made it.

    Attributes:
        version: what a chunk's flag holds when the chunk is there.
        source: rank of the worker that writes.
    """

    arena: Arena
    offset: int
    version: int
    bytes: int
    chunk_bytes: int
    slab: int
    source: int

    @property
    def flags(self) -> Tensor:
        """``[chunks]`` int64."""
        start = self.offset + _HEADER
        count = kernels.chunk_count(self.bytes, self.chunk_bytes)
        return self.arena.memory[start : start + 8 * count].view(torch.int64)

    @property
    def data(self) -> Tensor:
        """``[bytes]`` uint8: the state itself."""
        chunks = kernels.chunk_count(self.bytes, self.chunk_bytes)
        start = self.offset + -(-(_HEADER + 8 * chunks) // _PAGE) * _PAGE
        return self.arena.memory[start : start + self.bytes]

    @property
    def state(self) -> int:
        """``WRITING``, ``COMPLETE``, or ``LOST`` when the writer ended before it was done."""
        return self.arena._load(self.offset)

    def complete(self, checksum: int) -> None:
        """Say that all of it is there."""
        native.function("mflex_twin_store")(self._word("checksum"), checksum)
        native.function("mflex_twin_store")(self._word("state"), COMPLETE)

    def take(self) -> None:
        """Say that one reader is done."""
        native.function("mflex_twin_add")(self._word("taken"), 1)

    def touch(self) -> None:
        """Make the page tables, so that a copy meets no page faults."""
        data = self.data
        native.function("mflex_twin_touch")(data.data_ptr(), data.nbytes)

    def save(self, state: Tensor) -> int:
        """Copy ``state`` in and return its checksum. Both are in host memory."""
        arguments = (state.data_ptr(), self.data.data_ptr(), self.bytes, self.chunk_bytes)
        checksum: int = native.function("mflex_twin_save")(
            *arguments, self.flags.data_ptr(), self.version
        )
        return checksum

    def intact(self) -> bool:
        """Whether the bytes are those that were written, by their checksum."""
        found = native.function("mflex_twin_checksum")(
            self.data.data_ptr(), self.bytes, self.chunk_bytes
        )
        return bool(found == self.arena._load(self.offset + 8 * _WORDS.index("checksum")))

    def _word(self, name: str) -> int:
        return self.arena.memory.data_ptr() + self.offset + 8 * _WORDS.index(name)
