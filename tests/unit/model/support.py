"""Small models and micro-batches for the tests of the model room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.blocks import Block, build_block
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.tensor_group import SOLO, TensorGroup


def make_config(**changes: Any) -> ModelConfig:
    """A GPT of two layers, without dropout."""
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "padded_vocab_size": 64,
        "max_position_embeddings": 64,
        "ffn_hidden_size": 64,
        "kv_channels": 8,
        "num_query_groups": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Large enough for the layers to matter.
        "init_method_std": 0.2,
        "seed": 7,
    }
    return ModelConfig(**{**values, **changes})


def make_bert(**changes: Any) -> ModelConfig:
    """A BERT of two layers with the sentence-order head."""
    values = {"architecture": "bert", "causal": False, "num_tokentypes": 2, "binary_head": True}
    return make_config(**{**values, **changes})


def build_model(config: ModelConfig, group: TensorGroup = SOLO) -> list[Block]:
    """All units of the model on this process, with one shared tied embedding.

    Of units that ``group`` shares, this worker's parts.
    """
    blocks = [build_block(unit, config, group=group) for unit in config.layers.units]
    tied = config.layers.tied_slab
    if tied is not None:
        for name, parameter in blocks[0].slab_parameters()[tied].items():
            blocks[-1].bind(name, parameter)
    return blocks


def make_batch(
    lengths: Sequence[int],
    config: ModelConfig,
    *,
    seed: int = 0,
    samples: Sequence[int] | None = None,
) -> PackedBatch:
    """A micro-batch of whole samples; sample i has the same contents wherever it is packed."""
    samples = tuple(samples if samples is not None else range(len(lengths)))
    parts = []
    for sample, length in zip(samples, lengths, strict=True):
        generator = torch.Generator().manual_seed(1000 * seed + sample)
        tokens = torch.randint(config.vocab_size, (2, length), generator=generator)
        types = torch.randint(2, (length,), generator=generator)
        mask = (torch.rand(length, generator=generator) < 0.8).float()
        parts.append((tokens[0], tokens[1], types, mask))
    tokens, labels, types, mask = (torch.cat(column) for column in zip(*parts, strict=True))
    return PackedBatch(
        lengths=tuple(lengths),
        samples=samples,
        starts=(0,) * len(lengths),
        tokens=tokens,
        labels=labels,
        loss_mask=mask,
        token_types=types,
        sentence_order=torch.tensor([s % 2 for s in samples]),
    )


def split_batch(batch: PackedBatch) -> list[PackedBatch]:
    """Each sample of ``batch`` as a micro-batch of its own."""
    parts, first = [], 0
    for i, (length, sample, start) in enumerate(
        zip(batch.lengths, batch.samples, batch.starts, strict=True)
    ):
        rows = slice(first, first + length)
        fields: dict[str, Any] = {
            name: None if value is None else value[rows]
            for name in ("tokens", "labels", "loss_mask", "token_types")
            for value in [getattr(batch, name)]
        }
        order = None if batch.sentence_order is None else batch.sentence_order[i : i + 1]
        parts.append(PackedBatch((length,), (sample,), (start,), sentence_order=order, **fields))
        first += length
    return parts


def run(blocks: Sequence[Block], batch: PackedBatch) -> torch.Tensor:
    """Loss sums of a micro-batch."""
    hidden: torch.Tensor | None = None
    for block in blocks:
        hidden = block(hidden, batch)
    assert hidden is not None
    return hidden


def hidden_states(blocks: Sequence[Block], batch: PackedBatch) -> torch.Tensor:
    """What the head is given."""
    return run(blocks[:-1], batch)


def named_parameters(blocks: Sequence[Block]) -> dict[str, torch.nn.Parameter]:
    """All parameters by Megatron's full name."""
    return {
        name: parameter
        for block in blocks
        for parameters in block.slab_parameters().values()
        for name, parameter in parameters.items()
    }
