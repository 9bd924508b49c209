"""Loading: any subset of the tensors, by name, into any layout and any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from megatron_flex.checkpoint.errors import CheckpointError, quiet, unwrap
from megatron_flex.checkpoint.layout import locate
from megatron_flex.checkpoint.lazy import LazyTensors
from megatron_flex.checkpoint.manifest import (
    COMMON,
    MODEL,
    Manifest,
    TensorEntry,
    dtype_of,
    share_of,
    values_digest,
    verify_files,
)
from megatron_flex.checkpoint.parts import Part, Value, local_of
from megatron_flex.checkpoint.ranks import DEFAULT_TIMEOUT, Ranks
from megatron_flex.checkpoint.vocabulary import PADDED
from megatron_flex.model.config import IMPLEMENTATION, completed
from megatron_flex.model.tensor_cut import Piece

NOT_STRUCTURAL = frozenset(
    {"hidden_dropout", "attention_dropout", "init_method_std", "seed", "params_dtype", PADDED}
).union(IMPLEMENTATION)
"""Fields of a model's configuration that may differ between saving and loading."""


def load(
    directory: Path | str,
    tensors: Mapping[str, Value],
    *,
    iteration: int | None = None,
    group: dist.ProcessGroup | None,
    model: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> dict[str, Any]:
    """Fill ``tensors`` from the checkpoint of ``iteration`` (default: the tracker's).

    Each rank gives the tensors it wants, by name; several may want the same. Of some it may want a
    part; how they were cut when they were saved plays no role. Shapes must be the
    saved ones, but for rows that pad the vocabulary, which keep their values; a floating-point
    dtype may differ, values are cast then. ``model``, when given,
    must agree with the saved ``common["model"]``. All files are compared with their checksums
    before anything is read from them, each by one rank. Returns the saved ``common``.

    Raises :class:`CheckpointError` on all ranks when anything fails on one.
    """
    ranks = Ranks(group, timeout)
    step = f"reading the checkpoint in {directory}"
    path = Path(ranks.from_first(step, lambda: str(locate(directory, iteration))))
    step = f"reading the checkpoint {path}"
    manifests: list[Manifest] = []
    commons: list[dict[str, Any]] = []

    def verify() -> None:
        manifest = Manifest.read(path)
        verify_files(path, manifest.files, {COMMON})
        common = json.loads((path / COMMON).read_bytes())
        if model is not None:
            check_model(common.get(MODEL, {}), model)
        check_tensors(manifest, tensors)
        verify_files(path, manifest.files, share_of(manifest.files, ranks.rank, ranks.size))
        manifests.append(manifest)
        commons.append(common)

    ranks.gather(step, verify)
    ranks.gather(step, lambda: _read(path, manifests[0], tensors))
    return commons[0]


def read_common(directory: Path | str, iteration: int | None = None) -> dict[str, Any]:
    """The ``common`` of a checkpoint, without its tensors. One process, no communication."""
    path = locate(directory, iteration)
    verify_files(path, Manifest.read(path).files, {COMMON})
    common: dict[str, Any] = json.loads((path / COMMON).read_bytes())
    return common


def verify(directory: Path | str, iteration: int | None = None) -> Manifest:
    """Compare all files of a checkpoint with their checksums. One process."""
    path = locate(directory, iteration)
    manifest = Manifest.read(path)
    verify_files(path, manifest.files, sorted(manifest.files))
    return manifest


class StoredTensors(LazyTensors):
    """The tensors of a checkpoint whose files are known to be whole; each is read on access.

    Args:
        path: directory of the checkpoint.
        manifest: what it holds.
        without: tensors whose names begin so are left out.
    """

    def __init__(self, path: Path, manifest: Manifest, *, without: str | None) -> None:
        self._path = path
        self._manifest = manifest
        self._reader = _Reader(path)
        self.forms = {
            name: torch.empty(entry.shape, dtype=dtype_of(entry), device="meta")
            for name, entry in manifest.tensors.items()
            if without is None or not name.startswith(without)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = torch.empty_like(self.forms[name], device="cpu")
        _read(self._path, self._manifest, {name: tensor}, self._reader)
        return tensor


class _Reader(FileSystemReader):
    """Reads the metadata once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


def check_model(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], ignore: frozenset[str] = NOT_STRUCTURAL
) -> None:
    """Raise :class:`CheckpointError` naming the fields in which two models differ."""
    missing = object()
    saved = completed(saved)
    wanted = completed(json.loads(json.dumps(wanted)))  # a tuple equals the list it was saved as
    different = [
        f"{name} is {_word(saved.get(name, missing), missing)} in the checkpoint and"
        f" {_word(wanted.get(name, missing), missing)} in this run"
        for name in sorted({*saved, *wanted} - ignore)
        if saved.get(name, missing) != wanted.get(name, missing)
    ]
    if different:
        raise CheckpointError(f"the checkpoint is of another model: {'; '.join(different)}")


def _word(value: Any, missing: object) -> str:
    return "absent" if value is missing else json.dumps(value)


def check_tensors(manifest: Manifest, tensors: Mapping[str, Value]) -> None:
    """Raise :class:`CheckpointError` unless the checkpoint can fill all of ``tensors``."""
    missing = sorted(name for name in tensors if name not in manifest.tensors)
    if missing:
        advice = ""
        if all(name.startswith("optimizer.") for name in missing):
            advice = "; it was saved without them: load with --no-load-optim"
        raise CheckpointError(
            f"the checkpoint has no {missing[0]}"
            f"{f' and {len(missing) - 1} more wanted tensors' if missing[1:] else ''}{advice}"
        )
    for name, value in tensors.items():
        entry, tensor, shape = manifest.tensors[name], local_of(value), tuple(value.shape)
        if entry.shape != shape and not _repadded(entry, shape):
            raise CheckpointError(
                f"{name} has shape {list(entry.shape)} in the checkpoint and {list(shape)} in this"
                " run"
            )
        saved = dtype_of(entry)
        if saved != tensor.dtype and not (saved.is_floating_point and tensor.is_floating_point()):
            raise CheckpointError(
                f"{name} is {entry.dtype} in the checkpoint and {tensor.dtype} in this run"
            )


def _repadded(entry: TensorEntry, shape: tuple[int, ...]) -> bool:
    """Whether ``shape`` is the saved one but for the number of rows that pad the vocabulary."""
    if entry.rows is None or not shape or entry.shape[0] == shape[0]:
        return False
    return entry.shape[1:] == shape[1:] and shape[0] >= entry.rows


class _BlockPlanner(DefaultLoadPlanner):
    """Reads the blocks of this rank's parts, from whatever chunks they lie in."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def create_local_plan(self) -> LoadPlan:
        """All that is needed of each block."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, part in self._parts.items():
            blocks = [
                ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                for piece in part.pieces
            ]
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, blocks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """A block."""
        assert index.offset is not None
        return self._parts[index.fqn].at(index.offset)


def _read(
    path: Path,
    manifest: Manifest,
    tensors: Mapping[str, Value],
    reader: FileSystemReader | None = None,
) -> None:
    """Read this rank's tensors, and compare those on the host with their checksums."""
    parts = {}
    for name, value in tensors.items():
        part, entry = (
            value if isinstance(value, Part) else Part.whole(value),
            manifest.tensors[name],
        )
        # Of a vocabulary padded to another size the rows that pad it here stay as they are.
        repadded = _repadded(entry, part.shape)
        parts[name] = part.first_rows(entry.rows or 0) if repadded else part
    if not parts:
        return
    try:
        with quiet(True):
            dcp_load(
                {name: part.local for name, part in parts.items()},
                storage_reader=reader or FileSystemReader(path),
                planner=_BlockPlanner(parts),
                no_dist=True,
            )
    except CheckpointException as error:
        raise unwrap(error, f"reading {path}") from error
    for name, part in parts.items():
        if not _matches(part, manifest.tensors[name]):
            raise CheckpointError(f"{name} of {path} does not match its checksum")


def _matches(part: Part, entry: TensorEntry) -> bool:
    """Whether what was read has the digests of the chunks that are whole in it.

    What is not on the host, or of another type, is not compared.
    """
    if part.local.device.type != "cpu" or part.local.dtype != dtype_of(entry):
        return True
    for chunk in entry.blocks:
        sizes = chunk.tokens(entry.rows)
        for piece in part.pieces:
            start = [a - b for a, b in zip(chunk.offsets, piece.offsets, strict=True)]
            ends = zip(start, sizes, piece.sizes, strict=True)
            if all(a >= 0 and a + size <= extent for a, size, extent in ends):
                local = tuple(a + b for a, b in zip(piece.local, start, strict=True))
                block = part.view(Piece(chunk.offsets, sizes, local))
                if values_digest(block) != chunk.digest:
                    return False
    return True
