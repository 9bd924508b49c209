"""This program's own checkpoints as one end of a conversion."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatron_flex.checkpoint.conversion.arguments import KEPT, megatron_arguments
from megatron_flex.checkpoint.conversion.hugging_face.companions import (
    beside,
    install,
    located,
    moved,
)
from megatron_flex.checkpoint.conversion.weights import Training, Weights
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.layout import locate
from megatron_flex.checkpoint.load import StoredTensors, read_common, verify
from megatron_flex.checkpoint.manifest import MODEL, Manifest
from megatron_flex.checkpoint.options import OPTIMIZER
from megatron_flex.checkpoint.save import save
from megatron_flex.model.config import ModelConfig, local


def read_flex(directory: Path, *, iteration: int | None = None, optimizer: bool = False) -> Weights:
    """The weights, which are read when they are asked for; all files match their checksums.

    With ``optimizer`` also its state, where the checkpoint has it.
    """
    common = read_common(directory, iteration)
    known = {field.name for field in fields(ModelConfig)}
    model = common.get(MODEL, {})
    if not model or model.keys() - known:
        raise CheckpointError(
            f"the model of {directory} cannot be understood:"
            f" {sorted(model.keys() - known) or 'it is not described'}"
        )
    manifest = verify(directory, iteration)
    training = _training(common, manifest) if optimizer else None
    tensors = StoredTensors(
        locate(directory, iteration), manifest, without=OPTIMIZER if training is None else None
    )
    progress = common.get("progress", {})
    said = {n: v for n, v in common.get("arguments", {}).items() if n in KEPT}
    arguments = Namespace(**located(said, directory))
    return Weights(
        local(ModelConfig(**model)),
        tensors,
        manifest.iteration,
        int(progress.get("consumed_samples", 0)),
        arguments,
        companions=beside(directory, arguments),
        training=training,
    )


def _training(common: Mapping[str, Any], manifest: Manifest) -> Training | None:
    """Where the run stood, if its optimizer's state is there."""
    schedule, arguments = common.get("opt_param_scheduler"), common.get("arguments", {})
    if schedule is None or not any(name.startswith(OPTIMIZER) for name in manifest.tensors):
        return None
    plain = Training(0, {})
    return Training(
        int(common["optimizer_steps"]),
        schedule,
        (arguments.get("adam_beta1", plain.betas[0]), arguments.get("adam_beta2", plain.betas[1])),
        arguments.get("adam_eps", plain.eps),
        float(common.get("progress", {}).get("flops", 0.0)),
    )


def plain_arguments(weights: Weights) -> dict[str, Any]:
    """The arguments of a model that a checkpoint can hold, by Megatron's names."""
    arguments = vars(megatron_arguments(weights, ckpt_format="torch_dcp"))
    return {n: v for n, v in arguments.items() if type(v) in (bool, int, float, str)}


def write_flex(directory: Path, weights: Weights) -> Path:
    """Write a checkpoint that a run takes its weights from (``--finetune``), or goes on from where
    the optimizer's state is there."""
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
    if (training := weights.training) is not None:
        common["optimizer_steps"] = training.steps
        common["opt_param_scheduler"] = dict(training.schedule)
        common["progress"]["flops"] = training.flops
        common["rng"] = {"seed": weights.config.seed}
    return save(directory, weights.iteration, weights.tensors, common, group=None)
