"""The safetensors of a Hugging Face directory: read one at a time, and written as they come."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.layout import TRACKER, write_synced

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        hint = ""
        if (path.parent / TRACKER).is_file():
            hint = ": it has checkpoints of a run, which are for --load (or --loader flex)"
        raise CheckpointError(f"{path.parent} has no {path.name}{hint}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    # Opened anew each time: what was read stays in memory as long as its file is open.
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, FileNotFoundError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


@dataclass(frozen=True)
class Stored:
    """A tensor on the disk."""

    path: Path
    name: str
    form: torch.Tensor

    def read(self) -> torch.Tensor:
        """Its values."""
        with _opened(self.path) as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
            return tensor


def find_stored(directory: Path) -> dict[str, Stored]:
    """All tensors of ``model.safetensors``, or of the files that the index names."""
    if (directory / INDEX).exists():
        mapped = read_json(directory / INDEX).get("weight_map", {})
        files = sorted(set(mapped.values()))
    elif (directory / SINGLE).exists():
        mapped, files = {}, [SINGLE]
    else:
        raise CheckpointError(
            f"{directory} has no {SINGLE} and no {INDEX}: with other formats of weights, load the"
            " model with transformers and save_pretrained it again"
        )
    found: dict[str, Stored] = {}
    for name in files:
        path = directory / name
        with _opened(path) as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                part = file.get_slice(key)
                dtype = _dtype(part.get_dtype(), key)
                form = torch.empty(part.get_shape(), dtype=dtype, device="meta")
                found[key] = Stored(path, key, form)
    if missing := sorted(set(mapped) - set(found)):
        raise CheckpointError(f"{directory} lacks {missing[0]}, which {INDEX} lists")
    return found


def _dtype(code: str, name: str) -> torch.dtype:
    for dtype, known in CODES.items():
        if code == known:
            return dtype
    if code in ("BOOL", "U8", "I64"):  # masks and positions, which are not weights
        return torch.int64
    raise CheckpointError(f"{name} has the type {code}: {', '.join(CODES.values())} are known")


@dataclass(frozen=True)
class Shard:
    """One file to be: its name, and its tensors' forms in their order."""

    file: str
    forms: Mapping[str, torch.Tensor]


def plan_shards(forms: Mapping[str, torch.Tensor], limit: int) -> list[Shard]:
    """Files of at most ``limit`` bytes (or one tensor), in the order of ``forms``."""
    groups: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, form in forms.items():
        if groups[-1] and size + form.nbytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = form
        size += form.nbytes
    if len(groups) == 1:
        return [Shard(SINGLE, groups[0])]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def write_shards(
    directory: Path, shards: list[Shard], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write ``tensors``, which come in the order of the shards, and the index.

    The library's own writer takes all tensors of a file at once; here one is in memory.
    """
    coming = iter(tensors)
    for shard in shards:
        with open(directory / shard.file, "wb") as file:
            file.write(_header(shard.forms))
            for name, form in shard.forms.items():
                found, tensor = next(coming)
                if (found, tensor.shape, tensor.dtype) != (name, form.shape, form.dtype):
                    raise AssertionError(f"{found} comes where {name} belongs")
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        total = sum(form.nbytes for shard in shards for form in shard.forms.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: shard.file for shard in shards for name in shard.forms},
        }
        write_synced(directory / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _header(forms: Mapping[str, torch.Tensor]) -> bytes:
    """Length and JSON: the format's front matter, padded to a multiple of eight bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, form in forms.items():
        entries[name] = {
            "dtype": CODES[form.dtype],
            "shape": list(form.shape),
            "data_offsets": [offset, offset + form.nbytes],
        }
        offset += form.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
