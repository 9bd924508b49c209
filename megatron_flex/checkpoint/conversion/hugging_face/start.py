"""``--load-hf``: a run that begins from a Hugging Face directory, converted once
beside its saves."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from megatron_flex.checkpoint.conversion.flex import plain_arguments, write_flex
from megatron_flex.checkpoint.conversion.hugging_face.companions import moved
from megatron_flex.checkpoint.conversion.hugging_face.directory import (
    ReadOptions,
    read_hugging_face,
)
from megatron_flex.checkpoint.conversion.shapes import check_weights
from megatron_flex.checkpoint.errors import CheckpointError, describe
from megatron_flex.checkpoint.layout import TRACKER

_POLL = 0.2  # seconds


def arguments_of(directory: Path, model_type: str, target: Path | None) -> dict[str, Any]:
    """Megatron's arguments for the model in a directory, without reading its weights.

    With ``target`` they are those of the checkpoint that it is converted to.
    """
    quiet = ReadOptions(say=lambda _: None)
    found = plain_arguments(read_hugging_face(directory, model_type, quiet))
    return found if target is None else moved(found, directory.absolute(), target)


def converted_directory(directory: Path, save: Path) -> Path:
    """Where the checkpoint of a directory lies, as it is now: another model has another place."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory")
    state = [str(directory.resolve())]
    for path in sorted(directory.iterdir()):
        if path.is_file():
            stat = path.stat()
            state.append(f"{path.name} {stat.st_size} {stat.st_mtime_ns}")
    digest = hashlib.sha256("\n".join(state).encode()).hexdigest()[:12]
    return save / f"hugging_face-{digest}"


def convert_once(
    directory: Path, save: Path, model_type: str, *, rank: int, timeout: float
) -> Path:
    """The converted checkpoint of a directory; the first worker makes it if it is not there yet.

    The others wait for it, at most ``timeout`` seconds.
    """
    target = converted_directory(directory, save)
    if rank == 0:
        if not (target / TRACKER).exists():
            weights = read_hugging_face(directory, model_type)
            check_weights(weights)
            try:
                write_flex(target, weights)
            except OSError as error:
                raise CheckpointError(f"--load-hf: cannot convert: {describe(error)}") from error
        return target
    end = time.monotonic() + timeout
    while not (target / TRACKER).exists():
        if time.monotonic() > end:
            raise CheckpointError(
                f"the first worker did not convert {directory} into {target} in {timeout:.0f} s:"
                " its message says why, or --save is not the same directory for all"
            )
        time.sleep(_POLL)
    return target
