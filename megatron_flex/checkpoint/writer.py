"""torch.distributed.checkpoint's file writer and planner, with digests taken on the way."""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.manifest import FileEntry, TensorEntry, tensor_entry
from megatron_flex.checkpoint.ranks import Ranks
from megatron_flex.checkpoint.vocabulary import token_rows


class DigestPlanner(DefaultSavePlanner):
    """The default planner; ``tensors`` has an entry for each tensor that this rank wrote.

    ``model`` is the model's configuration, for the rows that only pad the vocabulary. ``tensors``
    are asked for when they are written, which may be the moment when they are made.
    """

    def __init__(self, model: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors: dict[str, TensorEntry] = {}
        self._model = model
        self._source = tensors

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor itself, where the plan was made with its form."""
        return self._source[index.fqn]

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor:
        """Bring the tensor to the host once, for its digest and for the file."""
        tensor: torch.Tensor = object.detach().cpu()
        name = write_item.index.fqn
        self.tensors[name] = tensor_entry(tensor, token_rows(name, tensor.shape, self._model))
        return tensor


class DigestWriter(FileSystemWriter):
    """One file a rank; ``files`` has an entry for each file that this rank wrote.

    The ranks meet when all have written, with the time-out of ``ranks`` and not the group's:
    the collective with which torch.distributed.checkpoint goes on never waits for a disk.
    One thread, as an exception in a further thread of the base class would be lost.
    """

    def __init__(self, path: Path, ranks: Ranks, step: str, in_order: bool) -> None:
        super().__init__(
            path,
            single_file_per_rank=True,
            sync_files=True,
            thread_count=1,
            # Without it tensors are written in their order: those that are made meanwhile need it.
            per_thread_copy_ahead=0 if in_order else 10_000_000,
        )
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
        result: list[Future[list[WriteResult]]] = []
        base = super().write_data
        try:
            self._ranks.gather(self._step, lambda: result.append(base(plan, planner)))
        except CheckpointError as error:
            self.error = error
            raise
        return result[0]


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
