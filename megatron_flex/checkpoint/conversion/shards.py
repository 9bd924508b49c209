"""How Megatron-LM cuts a model over tensor-parallel ranks and pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_flex.checkpoint.conversion.weights import WORD_EMBEDDING
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.model.config import ModelConfig

# Column-parallel: an equal share of the outputs for each rank. Row-parallel: of the inputs.
_COLUMNS = (
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_fc1.weight",
    "linear_fc1.bias",
    "word_embeddings.weight",
    "output_layer.weight",
    "output_layer.bias",
)
_ROWS = ("linear_proj.weight", "linear_fc2.weight")


def cut_dimension(name: str) -> int | None:
    """The dimension that is cut over tensor-parallel ranks; ``None``: each has it whole."""
    if name.endswith(_COLUMNS):
        return 0
    return 1 if name.endswith(_ROWS) else None


def split(name: str, tensor: torch.Tensor, size: int, *, swiglu: bool) -> list[torch.Tensor]:
    """The parts of ``size`` tensor-parallel ranks.

    With SwiGLU each part of the first MLP matrix has a share of the gate and one of the rest.
    """
    dimension = cut_dimension(name)
    if dimension is None:
        return [tensor] * size
    if swiglu and "linear_fc1." in name:
        halves = [half.chunk(size) for half in tensor.chunk(2)]
        return [torch.cat(parts) for parts in zip(*halves, strict=True)]
    return list(tensor.chunk(size, dimension))


def merge(name: str, parts: Sequence[torch.Tensor], *, swiglu: bool) -> torch.Tensor:
    """The whole tensor from the parts of all tensor-parallel ranks."""
    dimension = cut_dimension(name)
    if len(parts) == 1 or dimension is None:
        return parts[0]
    if swiglu and "linear_fc1." in name:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[i] for i in (0, 1) for half in halves])
    return torch.cat(list(parts), dimension)


def check_sizes(config: ModelConfig, tensor: int, pipeline: int) -> None:
    """Raise :class:`CheckpointError` unless Megatron-LM can cut the model like that."""
    for what, extent in (
        ("--num-attention-heads", config.num_attention_heads),
        ("--num-query-groups", config.num_query_groups),
        ("--ffn-hidden-size", config.ffn_hidden_size),
        ("the padded vocabulary", config.padded_vocab_size),
    ):
        if extent % tensor:
            raise CheckpointError(
                f"{what} ({extent}) is not a multiple of {tensor}: change"
                " --target-tensor-parallel-size"
            )
    if config.num_layers % pipeline:
        raise CheckpointError(
            f"--num-layers ({config.num_layers}) is not a multiple of {pipeline}: change"
            " --target-pipeline-parallel-size"
        )


def stage_names(
    names: Sequence[str], config: ModelConfig, stack: str, stage: int, stages: int
) -> dict[str, str]:
    """Name within pipeline stage ``stage`` -> name in the whole model.

    Layers count from 0 in each stage. A tied model's last stage has its own copy of the word
    embedding, under the output layer's name.
    """
    per_stage = config.num_layers // stages
    prefix = f"{stack}.layers."
    first, last = stage == 0, stage == stages - 1
    result = {}
    for name in names:
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            local = int(number) - stage * per_stage
            if 0 <= local < per_stage:
                result[f"{prefix}{local}.{rest}"] = name
        elif first if name.startswith("embedding.") else last:
            result[name] = name
    if config.layers.tied and last and not first:
        result["output_layer.weight"] = WORD_EMBEDDING
    return result
