"""Saving: every rank writes the tensors it owns, the first rank names the result.

The format is torch.distributed.checkpoint's, so that its own reader and tools read it too;
``common.json`` and ``manifest.json`` lie beside its files.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megatron_flex.checkpoint import layout
from megatron_flex.checkpoint.errors import CheckpointError, describe, quiet, unwrap
from megatron_flex.checkpoint.lazy import LazyTensors, forms_of
from megatron_flex.checkpoint.manifest import (
    COMMON,
    MANIFEST,
    MODEL,
    FileEntry,
    Manifest,
    TensorEntry,
    digest_of,
)
from megatron_flex.checkpoint.parts import Part, Value, local_of
from megatron_flex.checkpoint.ranks import DEFAULT_TIMEOUT, Ranks
from megatron_flex.checkpoint.retention import KEEP_ALL, Retention
from megatron_flex.checkpoint.writer import DigestPlanner, DigestWriter


def save(
    directory: Path | str,
    iteration: int,
    tensors: Mapping[str, Value],
    common: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None,
    retention: Retention = KEEP_ALL,
    timeout: float = DEFAULT_TIMEOUT,
    foreign: layout.Foreign | None = None,
) -> Path:
    """Write the checkpoint of ``iteration`` and name it in the tracker; all ranks call this.

    ``tensors`` are those that this rank owns, by name; each name has one owner, or ranks whose
    parts of it are together the whole. ``common`` is a JSON object, the same on all ranks.
    ``group`` is a gloo group that nothing else uses meanwhile (``None``: a single process).
    ``timeout`` is in seconds for each wait. ``foreign``, asked by the first rank, refuses to save
    where another run has meanwhile. Returns the checkpoint's directory, which is on the disk then.

    Raises :class:`CheckpointError` on all ranks when anything fails on one; the checkpoints that
    were there before are as they were, and what was written of this one is deleted.
    """
    ranks = Ranks(group, timeout)
    directory = Path(directory)
    what = f"checkpoint of iteration {iteration}"
    text = _agree(ranks, what, tensors, common)

    with ExitStack() as stack:

        def prepare() -> str:
            directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(layout.locked(directory))
            if foreign is not None:
                foreign.check()
            layout.remove_leftovers(directory)
            return str(layout.create_temporary(directory, iteration))

        temporary = Path(ranks.from_first(f"preparing the {what} in {directory}", prepare))
        try:
            files, entries = _write(ranks, what, temporary, tensors, common.get(MODEL, {}))

            def publish() -> str:
                layout.write_synced(temporary / COMMON, text)
                files[COMMON] = FileEntry(len(text), digest_of(text))
                manifest = Manifest(iteration, files, entries)
                layout.write_synced(temporary / MANIFEST, manifest.dumps())
                path = layout.publish(temporary, iteration)
                if foreign is not None:
                    foreign.saved()
                for expired in retention.expired(layout.iterations_in(directory), iteration):
                    with suppress(OSError):  # the new checkpoint is complete all the same
                        layout.discard(directory / layout.name_of(expired))
                return str(path)

            return Path(ranks.from_first(f"naming the {what} in {directory}", publish))
        except BaseException:
            if ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise


def check_writable(
    directory: Path | str, *, group: dist.ProcessGroup | None, timeout: float = DEFAULT_TIMEOUT
) -> None:
    """Create ``directory`` and write a file there from all ranks, before training starts.

    Raises :class:`CheckpointError` when it is read-only, or not the same directory for all ranks.
    """
    ranks = Ranks(group, timeout)
    directory = Path(directory)
    step = f"checking that checkpoints can be saved into {directory}"

    def create() -> str:
        directory.mkdir(parents=True, exist_ok=True)
        return str(layout.create_temporary(directory, 0))

    temporary = Path(ranks.from_first(step, create))

    def write() -> None:
        _require_shared(temporary)
        layout.write_synced(temporary / f"{ranks.rank}", b"0")

    try:
        ranks.gather(step, write)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def _agree(
    ranks: Ranks, what: str, tensors: Mapping[str, Value], common: Mapping[str, Any]
) -> bytes:
    """Encode ``common``, and check that the ranks' contributions fit together."""
    encoded: list[bytes] = []

    def encode() -> dict[str, Any]:
        _require_json(common, "common")
        encoded.append(json.dumps(common, indent=1, sort_keys=True).encode())
        parts = {n: v for n, v in forms_of(tensors).items() if isinstance(v, Part)}
        return {
            "common": digest_of(encoded[0]),
            "names": [name for name in tensors if name not in parts],
            "parts": {
                name: {
                    "shape": list(part.shape),  # the first rank's own comes as it is, not as JSON
                    "blocks": [(p.offsets, p.sizes) for p in part.pieces],
                }
                for name, part in parts.items()
            },
        }

    parts = ranks.gather(f"preparing the {what}", encode)

    def compare() -> None:
        owners: dict[str, int] = {}
        for rank, part in enumerate(parts or ()):
            if part["common"] != digest_of(encoded[0]):
                raise CheckpointError(f"ranks 0 and {rank} have different common states")
            for name in part["names"]:
                if owners.setdefault(name, rank) != rank:
                    raise CheckpointError(
                        f"{name} is given by ranks {owners[name]} and {rank}; one must own it"
                    )
        _require_complete(owners, [part["parts"] for part in parts or ()])

    ranks.from_first(f"preparing the {what}", compare)
    return encoded[0]


def _write(
    ranks: Ranks,
    what: str,
    temporary: Path,
    tensors: Mapping[str, Value],
    model: Mapping[str, Any],
) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
    """Write all ranks' tensors; the first rank receives all entries, the others their own."""
    ranks.gather(f"opening the {what}", lambda: _require_shared(temporary))
    planner = DigestPlanner(model, tensors)
    lazy = isinstance(tensors, LazyTensors)
    writer = DigestWriter(temporary, ranks, f"writing the {what}", lazy=lazy)
    try:
        with quiet(ranks.group is None):
            dcp_save(
                {name: local_of(form) for name, form in forms_of(tensors).items()},
                storage_writer=writer,
                planner=planner,
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as error:
        raise writer.error or unwrap(error, f"writing the {what}") from error
    except RuntimeError as error:  # of a collective of torch.distributed.checkpoint
        raise writer.error or CheckpointError(
            f"while writing the {what}: lost a rank, whose own message says why ({describe(error)})"
        ) from error

    collected = ranks.gather(
        f"collecting the checksums of the {what}",
        lambda: {
            "files": {name: vars(entry) for name, entry in writer.files.items()},
            "tensors": {name: entry.to_json() for name, entry in planner.tensors.items()},
        },
    )
    files: dict[str, FileEntry] = {}
    entries: dict[str, TensorEntry] = {}
    for part in collected or ():
        files.update({name: FileEntry(**entry) for name, entry in part["files"].items()})
        for name, data in part["tensors"].items():
            entry, before = TensorEntry.from_json(data), entries.get(name)
            if before is not None:
                entry = TensorEntry.of_chunks(entry, (*before.chunks, *entry.chunks))
            entries[name] = entry
    return files, entries


def _require_complete(
    owners: Mapping[str, int], parts: Sequence[Mapping[str, Mapping[str, Any]]]
) -> None:
    """Raise :class:`CheckpointError` unless all ranks' parts of a tensor are the whole of it.

    ``owners`` are the ranks of whole tensors; ``parts`` those of each rank, by name.
    """
    shapes: dict[str, list[int]] = {}
    elements: dict[str, int] = {}
    seen: set[tuple[object, ...]] = set()
    for rank, of_rank in enumerate(parts):
        for name, part in of_rank.items():
            if name in owners:
                raise CheckpointError(
                    f"{name} is given whole by rank {owners[name]} and in part by rank {rank}"
                )
            if shapes.setdefault(name, part["shape"]) != part["shape"]:
                raise CheckpointError(f"{name} has other shapes on other ranks")
            elements[name] = elements.get(name, 0) + sum(
                math.prod(sizes) for _, sizes in part["blocks"]
            )
            for offsets, _ in part["blocks"]:
                if (name, *offsets) in seen:
                    raise CheckpointError(f"the same part of {name} is given twice")
                seen.add((name, *offsets))
    for name, shape in shapes.items():
        if elements[name] != math.prod(shape):
            raise CheckpointError(f"the ranks' parts of {name} are not the whole of it")


def _require_shared(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(
            f"{path.parent} is not the same directory for all ranks: --save must lie on storage"
            " that all nodes share"
        )


def _require_json(value: Any, where: str) -> None:
    """Raise :class:`CheckpointError` naming the first value that JSON cannot hold exactly."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}; keys must be strings")
            _require_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_json(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}; only JSON values can be saved there"
        )
