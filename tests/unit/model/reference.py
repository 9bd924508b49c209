"""megatron-core's own GPTModel and BertModel on the CPU, as references.

They need ``parallel_state``: one process, gloo, a file store. Their attention asks for CUDA, so a
plain softmax over a dense mask stands in for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.megatron import AttnMaskType, transformer_config
from tests.unit.model.support import split_batch


@contextlib.contextmanager
def model_parallel(directory: Path) -> Iterator[None]:
    """megatron-core's global state for one process."""
    from megatron.core import parallel_state

    store = dist.FileStore(str(directory / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class DenseAttention(torch.nn.Module):
    """Attention of one unpacked sample in its textbook form: ``[s, 1, heads, d]``."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: AttnMaskType, **_: Any
    ) -> None:
        super().__init__()
        self.causal = attn_mask_type is AttnMaskType.causal

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Gives ``[s, 1, heads * d]``."""
        length, _one, heads, depth = query.shape
        share = heads // key.shape[2]
        key, value = key.repeat_interleave(share, 2), value.repeat_interleave(share, 2)
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / depth**0.5
        if self.causal:
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), value).flatten(2)


def gpt_model(
    config: ModelConfig, *, pre_process: bool = True, post_process: bool = True, **parallel: Any
) -> torch.nn.Module:
    """``GPTModel`` of the same shape; its weights are to be replaced.

    ``parallel``: what its configuration says of the ranks over which ``parallel_state`` divides it;
    the others are ``GPTModel``'s own.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    spec.submodules.self_attention.submodules.core_attention = DenseAttention
    return GPTModel(
        dataclasses.replace(
            transformer_config(config),
            use_te_activation_func=False,
            **parallel,
        ),
        spec,
        vocab_size=config.padded_vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=config.layers.tied,
        position_embedding_type=config.position_embedding_type,
        rotary_percent=config.rotary_percent,
        rotary_base=config.rotary_base,
        rope_scaling=config.use_rope_scaling,
        rope_scaling_factor=config.rope_scaling_factor,
    )


def bert_model(config: ModelConfig) -> torch.nn.Module:
    """``BertModel`` of the same shape; its weights are to be replaced."""
    import copy

    from megatron.core.models.bert import bert_model as module
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec

    spec = copy.deepcopy(bert_layer_local_spec)
    spec.submodules.self_attention.submodules.core_attention = DenseAttention
    # Otherwise it asks which Transformer Engine is installed.
    with mock.patch.object(module, "MCoreDotProductAttention", DenseAttention):
        return module.BertModel(
            transformer_config(config),
            num_tokentypes=config.num_tokentypes,
            transformer_layer_spec=spec,
            vocab_size=config.padded_vocab_size,
            max_sequence_length=config.max_position_embeddings,
            share_embeddings_and_output_weights=config.layers.tied,
            position_embedding_type=config.position_embedding_type,
            rotary_percent=config.rotary_percent,
            add_binary_head=config.binary_head,
        )


def gpt_loss(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """The sum of a ``GPTModel``'s losses over the samples of a micro-batch, one after the other."""
    total = torch.zeros(())
    for part in split_batch(batch):
        assert part.tokens is not None
        assert part.labels is not None
        assert part.loss_mask is not None
        positions = torch.arange(len(part.tokens))[None]
        losses = model(part.tokens[None], positions, None, labels=part.labels[None])
        total = total + (losses[0] * part.loss_mask).sum()
    return total


@contextlib.contextmanager
def rotary_on_cpu() -> Iterator[None]:
    """``RotaryEmbedding`` moves its frequencies to the current CUDA device; let that be the CPU."""
    with mock.patch.object(torch.cuda, "current_device", return_value="cpu"):
        yield


def copy_weights(
    parameters: dict[str, torch.nn.Parameter], model: torch.nn.Module
) -> dict[str, torch.nn.Parameter]:
    """Give the reference our weights; names and shapes must agree, none left over."""
    theirs = dict(model.named_parameters())
    assert set(theirs) == set(parameters)
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(parameters[name])
    return theirs
