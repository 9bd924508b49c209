"""This program's own checkpoints as one end of a conversion: weights, no optimizer state."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatron_flex.checkpoint.conversion.arguments import KEPT, megatron_arguments
from megatron_flex.checkpoint.conversion.hugging_face.companions import beside, install, moved
from megatron_flex.checkpoint.conversion.weights import Weights
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.layout import locate
from megatron_flex.checkpoint.load import StoredTensors, read_common, verify
from megatron_flex.checkpoint.manifest import MODEL
from megatron_flex.checkpoint.options import OPTIMIZER
from megatron_flex.checkpoint.save import save
from megatron_flex.model.config import ModelConfig


def read_flex(directory: Path, *, iteration: int | None = None) -> Weights:
    """The weights, which are read when they are asked for; all files match their checksums."""
    common = read_common(directory, iteration)
    known = {field.name for field in fields(ModelConfig)}
    model = common.get(MODEL, {})
    if not model or model.keys() - known:
        raise CheckpointError(
            f"the model of {directory} cannot be understood:"
            f" {sorted(model.keys() - known) or 'it is not described'}"
        )
    manifest = verify(directory, iteration)
    tensors = StoredTensors(locate(directory, iteration), manifest, without=OPTIMIZER)
    progress = common.get("progress", {})
    arguments = Namespace(**{n: v for n, v in common.get("arguments", {}).items() if n in KEPT})
    return Weights(
        ModelConfig(**model),
        tensors,
        manifest.iteration,
        int(progress.get("consumed_samples", 0)),
        arguments,
        companions=beside(directory, arguments),
    )


def plain_arguments(weights: Weights) -> dict[str, Any]:
    """The arguments of a model that a checkpoint can hold, by Megatron's names."""
    arguments = vars(megatron_arguments(weights, ckpt_format="torch_dcp"))
    return {n: v for n, v in arguments.items() if type(v) in (bool, int, float, str)}


def write_flex(directory: Path, weights: Weights) -> Path:
    """Write a checkpoint that a run takes its weights from (``--finetune``)."""
    arguments = plain_arguments(weights)
    if weights.companions is not None:
        install(weights.companions, directory)
        arguments = moved(arguments, weights.companions, directory)
    common: dict[str, Any] = {
        MODEL: asdict(weights.config),
        "arguments": arguments,
        "progress": {
            "iteration": weights.iteration,
            "consumed_samples": weights.consumed_samples,
        },
    }
    return save(directory, weights.iteration, weights.tensors, common, group=None)
