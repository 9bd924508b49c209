"""This program's own checkpoints as one end of a conversion: weights, no optimizer state."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from megatron_flex.checkpoint.conversion.arguments import KEPT, megatron_arguments
from megatron_flex.checkpoint.conversion.weights import Weights
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.layout import locate
from megatron_flex.checkpoint.load import load, read_common
from megatron_flex.checkpoint.manifest import MODEL, Manifest, dtype_of
from megatron_flex.checkpoint.options import OPTIMIZER
from megatron_flex.checkpoint.save import save
from megatron_flex.model.config import ModelConfig


def read_flex(directory: Path, *, iteration: int | None = None) -> Weights:
    """Read the weights, and compare them with their checksums."""
    common = read_common(directory, iteration)
    known = {field.name for field in fields(ModelConfig)}
    model = common.get(MODEL, {})
    if not model or model.keys() - known:
        raise CheckpointError(
            f"the model of {directory} cannot be understood:"
            f" {sorted(model.keys() - known) or 'it is not described'}"
        )
    manifest = Manifest.read(locate(directory, iteration))
    tensors = {
        name: torch.empty(entry.shape, dtype=dtype_of(entry))
        for name, entry in manifest.tensors.items()
        if not name.startswith(OPTIMIZER)
    }
    load(directory, tensors, iteration=iteration, group=None)
    progress = common.get("progress", {})
    return Weights(
        ModelConfig(**model),
        tensors,
        manifest.iteration,
        int(progress.get("consumed_samples", 0)),
        Namespace(**{n: v for n, v in common.get("arguments", {}).items() if n in KEPT}),
    )


def write_flex(directory: Path, weights: Weights) -> Path:
    """Write a checkpoint that a run takes its weights from (``--finetune``)."""
    arguments = vars(megatron_arguments(weights, ckpt_format="torch_dcp"))
    common: dict[str, Any] = {
        MODEL: asdict(weights.config),
        "arguments": {n: v for n, v in arguments.items() if type(v) in (bool, int, float, str)},
        "progress": {
            "iteration": weights.iteration,
            "consumed_samples": weights.consumed_samples,
        },
    }
    return save(directory, weights.iteration, weights.tensors, common, group=None)
