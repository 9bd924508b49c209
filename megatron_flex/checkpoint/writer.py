"""torch.distributed.checkpoint's file writer and planner, with digests taken on the way."""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.lazy import forms_of
from megatron_flex.checkpoint.manifest import FileEntry, TensorEntry, chunk_of, tensor_entry
from megatron_flex.checkpoint.parts import Part, Value
from megatron_flex.checkpoint.ranks import Ranks
from megatron_flex.checkpoint.vocabulary import token_rows
from megatron_flex.model.tensor_cut import Piece

LAZY_FILE = 64 << 20
"""Bytes from which on a file of tensors that are made meanwhile is closed."""


class DigestPlanner(DefaultSavePlanner):
    """The default planner; ``tensors`` has an entry for each tensor that this rank wrote.

    Of a tensor that it has a part of the entry has this rank's chunks.

    ``model`` is the model's configuration, for the rows that only pad the vocabulary. ``tensors``
    are asked for when they are written, which may be the moment when they are made.
    """

    def __init__(self, model: Mapping[str, Any], tensors: Mapping[str, Value]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors: dict[str, TensorEntry] = {}
        self._model = model
        self._source = tensors
        self._parts = {n: v for n, v in forms_of(tensors).items() if isinstance(v, Part)}

    def create_local_plan(self) -> SavePlan:
        """Whole tensors as they are, and every block of a part as a chunk."""
        whole = {n: t for n, t in self.state_dict.items() if n not in self._parts}
        items = create_default_local_save_plan(whole, self.is_coordinator).items
        for name, part in self._parts.items():
            items += [_chunk(name, part, piece) for piece in part.pieces]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor itself, where the plan was made with its form."""
        value = self._source[index.fqn]
        if not isinstance(value, Part):
            return value
        assert index.offset is not None
        return value.at(index.offset)

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor:
        """Bring the tensor to the host once, for its digest and for the file."""
        tensor: torch.Tensor = object.detach().cpu()
        index = write_item.index
        part = self._parts.get(index.fqn)
        shape = tensor.shape if part is None else part.shape
        rows = token_rows(index.fqn, shape, self._model)
        if part is None:
            self.tensors[index.fqn] = tensor_entry(tensor, rows)
            return tensor
        assert index.offset is not None
        before = self.tensors.get(index.fqn)
        if before is None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            before = TensorEntry(part.shape, dtype, "", rows)
        chunk = chunk_of(tensor, tuple(index.offset), rows)
        self.tensors[index.fqn] = TensorEntry.of_chunks(before, (*before.chunks, chunk))
        return tensor


def _chunk(name: str, part: Part, piece: Piece) -> WriteItem:
    offsets = torch.Size(piece.offsets)
    return WriteItem(
        MetadataIndex(name, offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, torch.Size(piece.sizes)),
            TensorProperties.create_from_tensor(part.local),
            torch.Size(part.shape),
        ),
    )


class DigestWriter(FileSystemWriter):
    """One file a rank; ``files`` has an entry for each file that this rank wrote. With ``lazy``
    there are several: the base class holds the tensors of a file until it is complete.

    The ranks meet when all have written, with the time-out of ``ranks`` and not the group's:
    the collective with which torch.distributed.checkpoint goes on never waits for a disk.
    One thread, as an exception in a further thread of the base class would be lost.
    """

    def __init__(self, path: Path, ranks: Ranks, step: str, *, lazy: bool) -> None:
        super().__init__(
            path,
            single_file_per_rank=True,
            sync_files=True,
            thread_count=1,
            # Without it tensors are written in their order: those that are made meanwhile need it.
            per_thread_copy_ahead=0 if lazy else 10_000_000,
        )
        self._lazy = lazy
        self._hashing = _HashingFileSystem()
        self.fs = self._hashing
        self._ranks = ranks
        self._step = step
        #: What made :meth:`write_data` fail; the collective that follows it may fail too, where a
        #: rank is gone, and say less.
        self.error: CheckpointError | None = None

    @property
    def files(self) -> dict[str, FileEntry]:
        """Size and digest of the files written so far."""
        return self._hashing.files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and wait for the other ranks'."""
        results: list[WriteResult] = []
        base = super().write_data

        def write() -> None:
            for part in _parts(plan) if self._lazy else [plan]:
                results.extend(base(part, planner).wait())

        try:
            self._ranks.gather(self._step, write)
        except CheckpointError as error:
            self.error = error
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _parts(plan: SavePlan) -> Iterator[SavePlan]:
    """The plan cut to files of about :data:`LAZY_FILE` bytes, in the order of its tensors."""
    groups: list[list[WriteItem]] = [[]]
    size = 0
    for item in plan.items:
        if size >= LAZY_FILE:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.tensor_storage_size() or 0
    for number, group in enumerate(groups):
        place = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
        yield replace(plan, items=group, storage_data=place)


class _HashingFileSystem(FileSystem):
    """The local file system, remembering what was written."""

    def __init__(self) -> None:
        self.files: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        raw = open(path, "wb")  # noqa: SIM115 (closing it again may fail again)
        try:
            hashed = _HashedStream(raw, str(path))
            yield hashed  # type: ignore[misc]
            hashed.close()
        finally:
            with suppress(OSError):
                raw.close()
        self.files[Path(path).name] = FileEntry(hashed.size, hashed.hasher.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _HashedStream:
    """A file opened for writing front to back.

    An error of the disk is kept and raised by :meth:`tell`, :meth:`fileno` and :meth:`close`,
    not by :meth:`write`: torch.save calls that from C++, where an exception loses its cause.
    """

    def __init__(self, raw: io.BufferedWriter, path: str) -> None:
        self._raw = raw
        self._path = path
        self._error: OSError | None = None
        self.size = 0
        self.hasher = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        length = memoryview(data).nbytes
        if self._error is None:
            try:
                self._raw.write(data)
            except OSError as error:
                self._error = error
            else:
                self.hasher.update(data)
                self.size += length
        return length

    def _check(self) -> None:
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, self._path) from self._error

    def flush(self) -> None:
        if self._error is None:
            try:
                self._raw.flush()
            except OSError as error:
                self._error = error

    def tell(self) -> int:
        self._check()
        return self.size

    def fileno(self) -> int:
        self.flush()
        self._check()
        return self._raw.fileno()

    def close(self) -> None:
        self.flush()
        self._check()
