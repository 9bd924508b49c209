"""The manifest: a digest of each file and of each tensor of a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from megatron_flex.checkpoint.errors import CheckpointError, describe

MANIFEST = "manifest.json"
COMMON = "common.json"
MODEL = "model"
"""The key of the common state under which the model's configuration lies."""
VERSION = 1

_CHUNK = 8 << 20  # bytes read at a time


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and XXH3-128 digest (hexadecimal) of one file."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class TensorEntry:
    """Shape, dtype (``float32``) and XXH3-128 digest of the values of one tensor.

    When ``rows`` is given, the digest covers the first ``rows`` rows only: the others pad the
    vocabulary (see :mod:`megatron_flex.checkpoint.vocabulary`).
    """

    shape: tuple[int, ...]
    dtype: str
    digest: str
    rows: int | None = None

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> TensorEntry:
        """Read what JSON made of the fields of an entry."""
        return cls(tuple(entry["shape"]), entry["dtype"], entry["digest"], entry["rows"])

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
            "version": VERSION,
            "iteration": self.iteration,
            "files": {name: vars(entry) for name, entry in self.files.items()},
            "tensors": {name: vars(entry) for name, entry in self.tensors.items()},
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
        if body["version"] != VERSION:
            raise CheckpointError(
                f"{path} has version {body['version']}, this program reads {VERSION}"
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
    values = (
        tensor.detach()[slice(rows) if rows is not None else ...]
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
    )
    return TensorEntry(
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        xxhash.xxh3_128_hexdigest(values.data),
        rows,
    )


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
