"""How Megatron-LM cuts a model over tensor-parallel ranks and pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_flex.checkpoint.conversion.weights import WORD_EMBEDDING
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.parts import Part
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.tensor_cut import Cut, Piece, cut_of, full_shape, pieces


def split(config: ModelConfig, name: str, tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """The parts of ``size`` tensor-parallel ranks."""
    cut = cut_of(config, name)
    if cut is None:
        return [tensor] * size
    found = []
    for index in range(size):
        blocks = Part(tensor, tuple(tensor.shape), _of_rank(tensor.shape, cut, index, size))
        found.append(torch.cat([blocks.view(piece) for piece in blocks.pieces], cut.dim))
    return found


def merge(config: ModelConfig, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole tensor from the parts of all tensor-parallel ranks."""
    cut, size = cut_of(config, name), len(parts)
    if size == 1 or cut is None:
        return parts[0]
    whole = parts[0].new_empty(full_shape(parts[0].shape, cut, size))
    for index, own in enumerate(parts):
        there = Part(whole, tuple(whole.shape), _of_rank(whole.shape, cut, index, size))
        here = Part(own, there.shape, pieces(whole.shape, cut, index, size))
        for target, source in zip(there.pieces, here.pieces, strict=True):
            there.view(target).copy_(here.view(source))
    return whole


def _of_rank(shape: Sequence[int], cut: Cut, index: int, size: int) -> tuple[Piece, ...]:
    """Where the pieces of a rank lie in the full tensor."""
    return tuple(replace(p, local=p.offsets) for p in pieces(shape, cut, index, size))


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
