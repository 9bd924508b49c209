"""Megatron-LM's format ``torch_dist``: torch.distributed.checkpoint with all layers of a kind
stacked into one tensor, ``metadata.json`` and ``common.pt``."""

from __future__ import annotations

import io
import json
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megatron_flex.checkpoint import layout
from megatron_flex.checkpoint.conversion import pickles
from megatron_flex.checkpoint.conversion.arguments import (
    check_known_to_core,
    config_of,
    megatron_arguments,
)
from megatron_flex.checkpoint.conversion.legacy import source_directory
from megatron_flex.checkpoint.conversion.names import to_local, to_transformer_engine
from megatron_flex.checkpoint.conversion.optimizer import MASTER, MOMENTS, training_of
from megatron_flex.checkpoint.conversion.optimizer import common as common_state
from megatron_flex.checkpoint.conversion.weights import (
    OUTPUT_LAYER,
    Training,
    Weights,
    state_name,
)
from megatron_flex.checkpoint.errors import CheckpointError, describe, quiet, unwrap

COMMON = "common.pt"
FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
          "common_backend": "torch", "common_backend_version": 1}  # fmt: skip

_LAYER = re.compile(r"((?:optimizer\.state\.\w+\.)?(?:decoder|encoder)\.layers\.)(\d+)\.(.+)")
_STACK = re.compile(r"((?:optimizer\.state\.\w+\.)?(?:decoder|encoder)\.layers\.)(\D.*)")
_MASTER = "optimizer.state.fp32_param."  # megatron-core's name
_STATE = (*(state_name(kind, "") for kind in MOMENTS), _MASTER)
_WEIGHTS = (
    "embedding.", "decoder.", "encoder.", "output_layer.", "lm_head.", "pooler.", "binary_head.",
)  # fmt: skip


class _Reader(FileSystemReader):
    """Reads the metadata without running foreign code."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with open(self._get_metadata_path(), "rb") as file:
            metadata: Metadata = pickles.load_metadata(file)
        return metadata


def read_torch_dist(
    directory: Path,
    model_type: str,
    *,
    iteration: int | None = None,
    true_vocab_size: int | None = None,
    optimizer: bool = False,
    say: Callable[[str], object] = print,
) -> Weights:
    """Read the weights of a distributed checkpoint, written on any number of ranks.

    With ``optimizer`` also its state; ``say`` gets a sentence if that is there and not understood.
    """
    path = source_directory(directory, iteration)
    try:
        backend = json.loads((path / "metadata.json").read_bytes())["sharded_backend"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not in Megatron's format torch_dist: metadata.json: {describe(error)}"
        ) from error
    if backend != "torch_dist":
        raise CheckpointError(f"{path} is in the format {backend}; only torch_dist is known")
    common = pickles.read(path / COMMON)
    arguments = common.get("args")
    if not isinstance(arguments, Namespace):
        raise CheckpointError(f"{path / COMMON} has no args: the model's shape is unknown")
    config = config_of(arguments, model_type, true_vocab_size)
    check_known_to_core(config)

    reader = _Reader(path)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except Exception as error:  # a damaged file may raise nearly anything
        raise CheckpointError(f"cannot read {path / '.metadata'}: {describe(error)}") from error
    training = None
    if optimizer and common.get("optimizer") is not None:
        try:
            training = _training(common, arguments, saved)
        except CheckpointError as error:
            say(f"{path}: the optimizer's state is left out: {error}")
    begins = _WEIGHTS if training is None else (*_WEIGHTS, *_STATE)
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if isinstance(entry, TensorStorageMetadata)
        and name.startswith(begins)
        and "_extra_state" not in name
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with quiet(True):
            dcp_load(dict(wanted), storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise unwrap(error, f"reading {path}") from error

    tensors: dict[str, torch.Tensor] = {}
    for written, tensor in wanted.items():
        name = written.replace(_MASTER, state_name(MASTER, ""))
        match = None if _LAYER.fullmatch(name) else _STACK.fullmatch(name)
        if match is None:
            tensors[to_local(name)] = tensor
            continue
        if tensor.shape[0] != config.num_layers:
            raise CheckpointError(
                f"{name} holds {tensor.shape[0]} layers, the args say {config.num_layers}"
            )
        for number, layer in enumerate(tensor):
            tensors[to_local(f"{match[1]}{number}.{match[2]}")] = layer
    if config.layers.tied:
        for name in [name for name in tensors if name.endswith(OUTPUT_LAYER)]:
            tensors.pop(name)
    return Weights(
        config,
        tensors,
        int(common.get("iteration", 0) or 0),
        int(getattr(arguments, "consumed_train_samples", 0) or 0),
        arguments,
        int(getattr(arguments, "tensor_model_parallel_size", 1) or 1),
        int(getattr(arguments, "pipeline_model_parallel_size", 1) or 1),
        training=training,
    )


def _training(
    common: Mapping[str, Any], arguments: Namespace, saved: Mapping[str, Any]
) -> Training:
    if not any(name.startswith(_STATE[0]) for name in saved):
        raise CheckpointError(
            "it is not by parameters (--dist-ckpt-optim-fully-reshardable saves it so)"
        )
    return training_of(_inner(common["optimizer"]), arguments, common)


def _inner(optimizer: Any) -> Any:
    """The optimizer within one of mixed precision."""
    inside = isinstance(optimizer, dict) and "param_groups" not in optimizer
    return optimizer.get("optimizer") if inside else optimizer


def write_torch_dist(directory: Path, weights: Weights) -> Path:
    """Write a distributed checkpoint, which Megatron-LM loads on any layout, and the tracker."""
    check_known_to_core(weights.config)
    arguments = megatron_arguments(weights, ckpt_format="torch_dist")
    content = {"args": arguments, "checkpoint_version": 3.0, "iteration": weights.iteration}
    if (training := weights.training) is not None:
        inner = common_state(training)
        mixed = weights.config.params_dtype != "float32"
        content["optimizer"] = {"optimizer": inner} if mixed else inner
        content["opt_param_scheduler"] = dict(training.schedule)
        content["num_floating_point_operations_so_far"] = training.flops
    buffer = io.BytesIO()
    torch.save(content, buffer)
    try:
        with layout.writing(directory, weights.iteration) as temporary:
            with quiet(True):
                dcp_save(
                    {**weights.tensors, **_extra_states(weights)},
                    storage_writer=FileSystemWriter(temporary),
                    planner=_Stacking(weights.config.num_layers),
                    no_dist=True,
                )
            layout.write_synced(temporary / COMMON, buffer.getvalue())
            layout.write_synced(temporary / "metadata.json", json.dumps(FORMAT).encode())
    except CheckpointException as error:
        raise unwrap(error, f"writing into {directory}") from error
    return layout.locate(directory, weights.iteration)


def _extra_states(weights: Weights) -> dict[str, None]:
    """The names under which modules keep further state (of float8), all empty.

    megatron-core insists on finding those that its modules have, and ignores others.
    """
    number = weights.config.num_layers
    modules = ("self_attention.linear_qkv", "self_attention.linear_proj",
               "self_attention.core_attention", "mlp.linear_fc1", "mlp.linear_fc2")  # fmt: skip
    names = [
        f"{weights.stack}.layers.{module}._extra_state/shard_{layer}_{number}"
        for module in modules
        for layer in range(number)
    ]
    if weights.config.architecture == "bert":
        names.append("output_layer._extra_state/shard_0_1")
    return dict.fromkeys(names)


class _Stacking(DefaultSavePlanner):
    """Writes each layer's tensor as one slice of the tensor of all layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._num_layers = num_layers
        self._slices: dict[tuple[str, torch.Size | None], torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(n, t) for n, t in self.state_dict.items()])
        return self.plan

    def _item(self, name: str, tensor: torch.Tensor | None) -> WriteItem:
        if tensor is None:
            return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
        name = to_transformer_engine(name).replace(state_name(MASTER, ""), _MASTER)
        size, offsets = tuple(tensor.shape), (0,) * tensor.dim()
        if match := _LAYER.fullmatch(name):
            name = match[1] + match[3]
            tensor = tensor[None]
            size, offsets = (self._num_layers, *size), (int(match[2]), *offsets)
        index = MetadataIndex(name, torch.Size(offsets))
        self._slices[name, index.offset] = tensor
        return WriteItem(
            index,
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(offsets), tensor.shape),
                TensorProperties.create_from_tensor(tensor),
                torch.Size(size),
            ),
        )

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor | list[None]:
        # megatron-core wraps its objects in a list.
        return self._slices.get((index.fqn, index.offset), [None])
