"""The manifest: a digest of each file and of each tensor of a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from megatron_flex.checkpoint.errors import CheckpointError, describe

MANIFEST = "manifest.json"
COMMON = "common.json"
MODEL = "model"
"""The key of the common state under which the model's configuration lies."""
VERSION = 2
"""Tensors may be written in chunks since version 2; a manifest without any is of version 1."""

_CHUNK = 8 << 20  # bytes read at a time


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and XXH3-128 digest (hexadecimal) of one file."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor: where it begins, its extent, and the digest of its values."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    digest: str

    def tokens(self, rows: int | None) -> tuple[int, ...]:
        """The extent of what the digest covers: rows up to ``rows``, see :class:`TensorEntry`."""
        if rows is None:
            return self.sizes
        return (max(0, min(self.sizes[0], rows - self.offsets[0])), *self.sizes[1:])


@dataclass(frozen=True)
class TensorEntry:
    """Shape, dtype (``float32``) and XXH3-128 digest of the values of one tensor.

    When ``rows`` is given, digests cover the first ``rows`` rows only: the others pad the
    vocabulary (see :mod:`megatron_flex.checkpoint.vocabulary`). A tensor of which several ranks
    wrote their parts has a digest for each of its ``chunks``; its own is that of theirs.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: str
    rows: int | None = None
    chunks: tuple[Chunk, ...] = ()

    @classmethod
    def of_chunks(cls, entry: TensorEntry, chunks: Iterable[Chunk]) -> TensorEntry:
        """The entry of a tensor that lies in these chunks."""
        listed = tuple(sorted(chunks, key=lambda c: c.offsets))
        digest = digest_of(_encode([vars(chunk) for chunk in listed]))
        return replace(entry, digest=digest, chunks=listed)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> TensorEntry:
        """Read :meth:`to_json`'s form."""
        chunks = (
            Chunk(tuple(c["offsets"]), tuple(c["sizes"]), c["digest"])
            for c in entry.get("chunks", ())
        )
        shape, rows = tuple(entry["shape"]), entry["rows"]
        return cls(shape, entry["dtype"], entry["digest"], rows, tuple(chunks))

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        body = {"shape": self.shape, "dtype": self.dtype, "digest": self.digest, "rows": self.rows}
        return {**body, "chunks": [vars(c) for c in self.chunks]} if self.chunks else body

    @property
    def blocks(self) -> tuple[Chunk, ...]:
        """The chunks; one of all where it was written whole."""
        return self.chunks or (Chunk((0,) * len(self.shape), self.shape, self.digest),)

    @property
    def bytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * dtype_of(self).itemsize


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    iteration: int
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]

    def dumps(self) -> bytes:
        """The file's contents: a JSON object whose ``digest`` covers everything else."""
        body = {
            "version": VERSION if any(e.chunks for e in self.tensors.values()) else 1,
            "iteration": self.iteration,
            "files": {name: vars(entry) for name, entry in self.files.items()},
            "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
        }
        return _encode({**body, "digest": digest_of(_encode(body))})

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Read and check the manifest of the checkpoint in directory ``checkpoint``."""
        path = checkpoint / MANIFEST
        try:
            body = json.loads(path.read_bytes())
            digest = body.pop("digest")
            if digest != digest_of(_encode(body)):
                raise ValueError("its digest does not match its contents")
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{checkpoint} has no {MANIFEST}: it was not written by this program"
                " (tools/checkpoint/convert.py reads Megatron-LM's), or files were deleted"
            ) from error
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {describe(error)}") from error
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is corrupt: {error}; {_OTHER}") from error
        if not 1 <= body["version"] <= VERSION:
            raise CheckpointError(
                f"{path} has version {body['version']}, this program reads up to {VERSION}"
            )
        return cls(
            body["iteration"],
            {name: FileEntry(**entry) for name, entry in body["files"].items()},
            {name: TensorEntry.from_json(entry) for name, entry in body["tensors"].items()},
        )


_OTHER = "load an earlier one with --ckpt-step"


def _encode(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def digest_of(data: bytes) -> str:
    """XXH3-128 of ``data``, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def tensor_entry(tensor: torch.Tensor, rows: int | None = None) -> TensorEntry:
    """Describe a CPU tensor of any layout; equal values of equal dtype have equal digests."""
    values = tensor.detach()[slice(rows) if rows is not None else ...]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(tuple(tensor.shape), dtype, values_digest(values), rows)


def values_digest(tensor: torch.Tensor) -> str:
    """XXH3-128 of the values of a CPU tensor of any layout, hexadecimal."""
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(values.data)


def chunk_of(tensor: torch.Tensor, offsets: tuple[int, ...], rows: int | None = None) -> Chunk:
    """Describe a block that begins at ``offsets`` of a tensor; ``rows`` as :class:`TensorEntry`."""
    chunk = Chunk(offsets, tuple(tensor.shape), "")
    if rows is not None:
        tensor = tensor[: chunk.tokens(rows)[0]]
    return replace(chunk, digest=values_digest(tensor))


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """The dtype that ``entry`` names."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype


def verify_files(checkpoint: Path, files: Mapping[str, FileEntry], names: Iterable[str]) -> None:
    """Compare ``names`` on the disk with the manifest; raise :class:`CheckpointError` else."""
    for name in names:
        entry, path = files[name], checkpoint / name
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                raise CheckpointError(
                    f"{path} is truncated or altered: {size:,} bytes instead of"
                    f" {entry.bytes:,}; {_OTHER}"
                )
            hasher = xxhash.xxh3_128()
            with open(path, "rb") as file:
                while chunk := file.read(_CHUNK):
                    hasher.update(chunk)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {describe(error)}; {_OTHER}") from error
        if hasher.hexdigest() != entry.digest:
            raise CheckpointError(f"{path} is corrupt: its checksum differs; {_OTHER}")


def share_of(files: Mapping[str, FileEntry], rank: int, size: int) -> list[str]:
    """The files that ``rank`` of ``size`` verifies: an even share of the bytes."""
    loads = [0] * size
    mine = []
    for name in sorted(files, key=lambda n: (-files[n].bytes, n)):
        target = loads.index(min(loads))
        loads[target] += files[name].bytes
        if target == rank:
            mine.append(name)
    return mine
