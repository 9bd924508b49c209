"""Megatron-LM's format ``torch``: one ``model_optim_rng.pt`` for each rank of a model replica."""

from __future__ import annotations

import io
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_flex.checkpoint import layout
from megatron_flex.checkpoint.conversion import pickles
from megatron_flex.checkpoint.conversion.arguments import (
    check_known_to_core,
    config_of,
    megatron_arguments,
)
from megatron_flex.checkpoint.conversion.names import to_local, to_transformer_engine
from megatron_flex.checkpoint.conversion.optimizer import in_order, training_of
from megatron_flex.checkpoint.conversion.optimizer import read as read_optimizer
from megatron_flex.checkpoint.conversion.optimizer import written as write_optimizer
from megatron_flex.checkpoint.conversion.shards import check_sizes, merge, split, stage_names
from megatron_flex.checkpoint.conversion.weights import (
    OUTPUT_LAYER,
    Weights,
    parameters_in,
    state_name,
)
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.model.config import ModelConfig

FILE = "model_optim_rng.pt"

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_CHUNK = re.compile(r"model(\d*)")
_LAYER = re.compile(r"(\w+\.layers\.)(\d+)(\..+)")


def source_directory(directory: Path, iteration: int | None) -> Path:
    """Where the checkpoint of ``iteration`` lies (default: the tracker's, also ``release``)."""
    tracker = directory / layout.TRACKER
    if iteration is None and tracker.is_file() and tracker.read_text().strip() == "release":
        return directory / "release"
    return layout.locate(directory, iteration)


def read_legacy(
    directory: Path,
    model_type: str,
    *,
    iteration: int | None = None,
    true_vocab_size: int | None = None,
    optimizer: bool = False,
    say: Callable[[str], object] = print,
) -> Weights:
    """Read all ranks' files of any tensor, pipeline and virtual pipeline parallel size.

    With ``optimizer`` also its state; ``say`` gets a sentence if that is there and not understood.
    """
    path = source_directory(directory, iteration)
    files: dict[tuple[int, int], Path] = {}
    for entry in sorted(path.glob(f"mp_rank_*/{FILE}")):
        match = _RANK.fullmatch(entry.parent.name)
        if match is None:
            raise CheckpointError(f"{entry}: expert-parallel checkpoints are not known")
        files[int(match[1]), int(match[2] or 0)] = entry
    if not files:
        raise CheckpointError(f"{path} has no mp_rank_XX/{FILE}: it is not in Megatron's format")
    tensor_size = max(t for t, _ in files) + 1
    pipeline_size = max(p for _, p in files) + 1
    missing = [
        (t, p) for t in range(tensor_size) for p in range(pipeline_size) if (t, p) not in files
    ]
    if missing:
        raise CheckpointError(
            f"{path} lacks the file of tensor-parallel rank {missing[0][0]}, pipeline stage"
            f" {missing[0][1]}"
        )
    ranks = {key: pickles.read(file) for key, file in files.items()}
    head = ranks[0, 0]
    arguments = head.get("args")
    if not isinstance(arguments, Namespace):
        raise CheckpointError(f"{files[0, 0]} has no args: the model's shape is unknown")
    if head.get("checkpoint_version", 0) < 2.0:
        raise CheckpointError(
            f"{files[0, 0]} has checkpoint version {head.get('checkpoint_version', 0)}, of before"
            " 2021: save it again with a newer Megatron-LM"
        )
    config = config_of(arguments, model_type, true_vocab_size)
    check_known_to_core(config)
    tensors: dict[str, torch.Tensor] = {}
    layers = 0
    order: list[list[str]] = [[] for _ in range(pipeline_size)]  # of each stage's parameters
    # Chunk c of stage p comes before chunk c + 1 of stage 0.
    for chunk in _chunks(head, files[0, 0]):
        for stage in range(pipeline_size):
            parts = [ranks[t, stage][chunk] for t in range(tensor_size)]
            depth = 0
            for name in parts[0]:
                if name.endswith("_extra_state") or not isinstance(parts[0][name], torch.Tensor):
                    continue
                full = to_local(name)
                if match := _LAYER.fullmatch(full):
                    depth = max(depth, int(match[2]) + 1)
                    full = f"{match[1]}{layers + int(match[2])}{match[3]}"
                order[stage].append(full)
                tensors[full] = merge(config, full, [p[name] for p in parts])
            layers += depth
    if layers != config.num_layers:
        raise CheckpointError(f"{path} has {layers} layers, its args say {config.num_layers}")
    training = None
    if optimizer and head.get("optimizer") is not None:
        try:
            training = training_of(head["optimizer"], arguments, head)
            tensors |= _states(ranks, order, {n: t.dim() for n, t in tensors.items()}, config)
        except CheckpointError as error:
            say(f"{path}: the optimizer's state is left out: {error}")
            training = None
    if config.layers.tied:
        for name in [name for name in tensors if name.endswith(OUTPUT_LAYER)]:
            tensors.pop(name)
    return Weights(
        config,
        tensors,
        int(head.get("iteration", 0) or 0),
        int(getattr(arguments, "consumed_train_samples", 0) or 0),
        arguments,
        tensor_size,
        pipeline_size,
        training=training,
    )


def _states(
    ranks: Mapping[tuple[int, int], Mapping[str, Any]],
    order: Sequence[Sequence[str]],
    dimensions: Mapping[str, int],
    config: ModelConfig,
) -> dict[str, torch.Tensor]:
    """The optimizer's state of all ranks, put together."""
    found: dict[str, torch.Tensor] = {}
    size = max(t for t, _ in ranks) + 1
    for stage, names in enumerate(order):
        parts = [
            read_optimizer(ranks[t, stage].get("optimizer"), names, dimensions) for t in range(size)
        ]
        for name in parts[0]:
            found[name] = merge(config, name, [part[name] for part in parts]).float()
    return found


def _chunks(head: dict[str, Any], path: Path) -> list[str]:
    found = [key for key in head if _CHUNK.fullmatch(key)]
    if not found:
        raise CheckpointError(f"{path} holds no model")
    return sorted(found, key=lambda key: int(key.removeprefix("model") or 0))


def write_legacy(
    directory: Path,
    weights: Weights,
    *,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    transformer_engine: bool,
) -> Path:
    """Write one file for each tensor-parallel rank and pipeline stage, and the tracker.

    ``transformer_engine`` chooses the names of the layer specification that will load it.
    """
    check_known_to_core(weights.config)
    check_sizes(weights.config, tensor_parallel_size, pipeline_parallel_size)
    weights = replace(
        weights,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
    )
    arguments = megatron_arguments(weights, ckpt_format="torch")
    arguments.transformer_impl = "transformer_engine" if transformer_engine else "local"
    with layout.writing(directory, weights.iteration) as temporary:
        for stage in range(pipeline_parallel_size):
            states = _stage_states(weights, stage, transformer_engine)
            optimizers = _stage_optimizers(weights, stage, transformer_engine)
            for rank, state in enumerate(states):
                suffix = f"_{stage:03d}" if pipeline_parallel_size > 1 else ""
                folder = temporary / f"mp_rank_{rank:02d}{suffix}"
                folder.mkdir()
                content = {
                    "args": arguments,
                    "checkpoint_version": 3.0,
                    "iteration": weights.iteration,
                    "model": state,
                }
                if (training := weights.training) is not None:
                    content["optimizer"] = optimizers[rank]
                    content["opt_param_scheduler"] = dict(training.schedule)
                    content["num_floating_point_operations_so_far"] = training.flops
                buffer = io.BytesIO()
                torch.save(content, buffer)
                layout.write_synced(folder / FILE, buffer.getvalue())
                layout.sync_directory(folder)
    return layout.locate(directory, weights.iteration)


def _stage_states(
    weights: Weights, stage: int, transformer_engine: bool
) -> list[dict[str, torch.Tensor]]:
    """The state of each tensor-parallel rank of a stage."""
    size = weights.tensor_parallel_size
    states: list[dict[str, torch.Tensor]] = [{} for _ in range(size)]
    for name, full in _stage_parameters(weights, stage, transformer_engine).items():
        parts = split(weights.config, full, weights.tensors[full], size)
        for state, part in zip(states, parts, strict=True):
            state[name] = part.clone()  # not the storage of the whole tensor
    return states


def _stage_parameters(weights: Weights, stage: int, transformer_engine: bool) -> dict[str, str]:
    """Name in a stage's file -> name in the model, in the order of Megatron's modules."""
    names = stage_names(
        parameters_in(weights.tensors), weights.config, weights.stack, stage,
        weights.pipeline_parallel_size,
    )  # fmt: skip
    found = {to_transformer_engine(n) if transformer_engine else n: f for n, f in names.items()}
    return {name: found[name] for name in in_order(found)}


def _stage_optimizers(
    weights: Weights, stage: int, transformer_engine: bool
) -> list[dict[str, Any]]:
    """The optimizer's state of each tensor-parallel rank of a stage; empty where there is none."""
    size, training = weights.tensor_parallel_size, weights.training
    if training is None:
        return [{} for _ in range(size)]
    names = list(_stage_parameters(weights, stage, transformer_engine).values())
    dimensions = {name: weights.tensors[name].dim() for name in names}

    def found(rank: int) -> dict[str, Any]:
        def find(kind: str, name: str) -> torch.Tensor:
            whole = weights.tensors[state_name(kind, name)]
            return split(weights.config, name, whole, size)[rank].clone()

        return write_optimizer(
            names,
            dimensions,
            find,
            training,
            mixed=weights.config.params_dtype != "float32",
            # Where Transformer Engine is, so is its Adam.
            torch_adam=not transformer_engine,
        )

    return [found(rank) for rank in range(size)]
