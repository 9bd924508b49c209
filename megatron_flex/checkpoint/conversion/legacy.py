"""Megatron-LM's format ``torch``: one ``model_optim_rng.pt`` for each rank of a model replica."""

from __future__ import annotations

import io
import re
import shutil
from argparse import Namespace
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
from megatron_flex.checkpoint.conversion.shards import check_sizes, merge, split, stage_names
from megatron_flex.checkpoint.conversion.weights import OUTPUT_LAYER, Weights
from megatron_flex.checkpoint.errors import CheckpointError

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
) -> Weights:
    """Read all ranks' files of any tensor, pipeline and virtual pipeline parallel size."""
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
                tensors[full] = merge(config, full, [p[name] for p in parts])
            layers += depth
    if layers != config.num_layers:
        raise CheckpointError(f"{path} has {layers} layers, its args say {config.num_layers}")
    if config.layers.tied:
        tensors.pop(OUTPUT_LAYER, None)
    return Weights(
        config,
        tensors,
        int(head.get("iteration", 0) or 0),
        int(getattr(arguments, "consumed_train_samples", 0) or 0),
        arguments,
        tensor_size,
        pipeline_size,
    )


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
    directory.mkdir(parents=True, exist_ok=True)
    with layout.locked(directory):
        layout.remove_leftovers(directory)
        temporary = layout.create_temporary(directory, weights.iteration)
        try:
            for stage in range(pipeline_parallel_size):
                states = _stage_states(weights, stage, transformer_engine)
                for rank, state in enumerate(states):
                    suffix = f"_{stage:03d}" if pipeline_parallel_size > 1 else ""
                    folder = temporary / f"mp_rank_{rank:02d}{suffix}"
                    folder.mkdir()
                    buffer = io.BytesIO()
                    content = {
                        "args": arguments,
                        "checkpoint_version": 3.0,
                        "iteration": weights.iteration,
                        "model": state,
                    }
                    torch.save(content, buffer)
                    layout.write_synced(folder / FILE, buffer.getvalue())
                    layout.sync_directory(folder)
            return layout.publish(temporary, weights.iteration)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _stage_states(
    weights: Weights, stage: int, transformer_engine: bool
) -> list[dict[str, torch.Tensor]]:
    """The state of each tensor-parallel rank of a stage."""
    size = weights.tensor_parallel_size
    names = stage_names(
        list(weights.tensors), weights.config, weights.stack, stage, weights.pipeline_parallel_size
    )
    states: list[dict[str, torch.Tensor]] = [{} for _ in range(size)]
    for local, full in names.items():
        written = to_transformer_engine(local) if transformer_engine else local
        parts = split(weights.config, full, weights.tensors[full], size)
        for state, part in zip(states, parts, strict=True):
            state[written] = part.clone()  # not the storage of the whole tensor
    return states
