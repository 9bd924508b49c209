"""What a run starts from says of the model: a checkpoint, or a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_flex.checkpoint.conversion.hugging_face.companions import located
from megatron_flex.checkpoint.conversion.hugging_face.start import (
    arguments_of,
    convert_once,
    converted_directory,
)
from megatron_flex.checkpoint.layout import latest
from megatron_flex.checkpoint.load import read_common
from megatron_flex.config.checkpoint import CheckpointOptions
from megatron_flex.config.config import Config


def source_arguments(config: Config, *, converts: bool = True) -> dict[str, Any]:
    """The arguments of the model that a run starts from, by the names of our fields.

    Where it starts by ``--load-hf`` also ``pretrained_checkpoint``, what that is converted to.
    Unless it ``converts`` that (a tool does not), files are those of the Hugging Face directory.
    Raises :class:`CheckpointError`.
    """
    o = config.checkpoint
    if o.load_hf is None:
        return _saved(o)
    assert o.save is not None
    if not _begins(o):
        return _saved(o)
    source = Path(o.load_hf)
    target = converted_directory(source, Path(o.save))
    found = arguments_of(source, config.architecture.upper(), target if converts else None)
    return {**found, "pretrained_checkpoint": str(target)}


def convert_source(config: Config, *, rank: int) -> None:
    """Convert what ``--load-hf`` names, unless the run goes on or that has been done before."""
    o = config.checkpoint
    if o.load_hf is None or not _begins(o):
        return
    assert o.save is not None
    convert_once(
        Path(o.load_hf),
        Path(o.save),
        config.architecture.upper(),
        rank=rank,
        timeout=60.0 * config.parallel.distributed_timeout_minutes,
    )


def _begins(o: CheckpointOptions) -> bool:
    """Whether ``--load`` holds nothing to go on from."""
    return o.load is None or (o.ckpt_step is None and latest(o.load) is None)


def _saved(o: CheckpointOptions) -> dict[str, Any]:
    """The arguments of the checkpoint of ``--load``, or else of ``--pretrained-checkpoint``."""
    directory, step = o.load, o.ckpt_step
    if o.pretrained_checkpoint is not None and _begins(o):
        directory, step = o.pretrained_checkpoint, None
    assert directory is not None
    return located(read_common(directory, step)["arguments"], directory)
