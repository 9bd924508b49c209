"""The units of the layer list as modules, and how they are built.

A block is made of megatron-core's modules and keeps Megatron's parameter names. It is a function
of (hidden, batch) alone, so a pipeline may run it anywhere, any number of times.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.attention import VarlenAttention
from megatron_flex.model.block import Block, decays
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.dropout import KeyedBiasDropoutAdd, keyed_dropout
from megatron_flex.model.engine import EnginePasses
from megatron_flex.model.head import HeadBlock
from megatron_flex.model.initialize import initialize
from megatron_flex.model.keys import EMBEDDING_SITE, hidden_site
from megatron_flex.model.layers import Kind, Unit
from megatron_flex.model.megatron import (
    DTYPES,
    IdentityOp,
    LanguageModelEmbedding,
    ModuleSpec,
    Ranks,
    half_layer,
    plain_name,
    transformer_config,
)
from megatron_flex.model.modules import layer_modules
from megatron_flex.model.tape import lookup
from megatron_flex.model.tensor_cut import vocabulary_rows
from megatron_flex.model.tensor_group import SOLO, TensorGroup
from megatron_flex.model.tensor_regions import add_up, divide

__all__ = [
    "Block",
    "EmbeddingBlock",
    "HeadBlock",
    "LayerBlock",
    "build_block",
    "build_shell",
    "decays",
]


class EmbeddingBlock(Block):
    """Word and position embeddings (and BERT's token types) with dropout."""

    def __init__(self, unit: Unit, config: ModelConfig, group: TensorGroup = SOLO) -> None:
        super().__init__(unit, config, group)
        self.embedding = LanguageModelEmbedding(
            transformer_config(config),
            vocab_size=config.padded_vocab_size,
            max_sequence_length=config.max_position_embeddings,
            position_embedding_type=config.position_embedding_type,
            num_tokentypes=config.num_tokentypes,
            tp_group=Ranks(group),
        )
        self._first = vocabulary_rows(config, group.index, group.size)[0]

    def forward(self, hidden: Tensor | None, batch: PackedBatch) -> Tensor:
        """``[T]`` tokens of the batch -> ``[T, 1, H]``; ``hidden`` is ``None``."""
        if batch.tokens is None:
            raise ValueError("the embedding needs the tokens of the micro-batch")
        context, group = self.context(batch, batch.tokens.device), self.group
        words = self.embedding.word_embeddings.weight
        if group.size == 1:
            x = lookup(batch.tokens, words)
        else:
            x = add_up(lookup(batch.tokens, words, self._first), group)
        if self.embedding.add_position_embedding:
            x = x + lookup(context.positions, self.embedding.position_embeddings.weight)
        if self.embedding.tokentype_embeddings is not None:
            if batch.token_types is None:
                raise ValueError("this model has token types, the micro-batch has none")
            x = x + lookup(batch.token_types, self.embedding.tokentype_embeddings.weight)
        x = x.unsqueeze(1)
        if group.sequence_parallel:
            x = divide(x, group)
        if self.training and self.config.hidden_dropout > 0.0:
            x = keyed_dropout(x, context, EMBEDDING_SITE, self.config.hidden_dropout, group)
        return x


class LayerBlock(Block):
    """The attention half or the MLP half of a transformer layer."""

    def __init__(
        self,
        unit: Unit,
        config: ModelConfig,
        group: TensorGroup = SOLO,
    ) -> None:
        super().__init__(unit, config, group)
        assert unit.layer is not None
        mlp = unit.kind is Kind.MLP
        site = hidden_site(unit.layer, mlp)
        self.layer = half_layer(
            config,
            unit.kind,
            unit.layer,
            VarlenAttention,
            ModuleSpec(KeyedBiasDropoutAdd, params={"site": site, "group": group}),
            layer_modules(config),
            group,
        )
        self._engine: EnginePasses | None = None
        if config.transformer_impl == "transformer_engine":
            self._engine = EnginePasses(self.layer, config, unit.layer)
        self._bda = cast(
            KeyedBiasDropoutAdd, self.layer.mlp_bda if mlp else self.layer.self_attn_bda
        )
        if not mlp and config.position_embedding_type == "rope":
            cast(VarlenAttention, self.layer.self_attention.core_attention).use_rotary()
        self.norm: nn.Module | None = None
        if config.apply_residual_connection_post_layernorm:
            # The layer adds to what it is given: so it is given the normalized input.
            self._norm_name = "pre_mlp_layernorm" if mlp else "input_layernorm"
            self.norm = getattr(self.layer, self._norm_name)
            setattr(self.layer, self._norm_name, IdentityOp())

    def full_names(self) -> dict[str, str]:
        """Names as in ``GPTModel`` or ``BertModel``: ``decoder.layers.3.mlp.linear_fc1.weight``."""
        prefix = f"{self.stack}.layers.{self.unit.layer}."
        names = {}
        if self.norm is not None:
            for name, _ in self.norm.named_parameters():
                names[f"{prefix}{self._norm_name}.{name}"] = f"norm.{name}"
        parameters = [name for name, _ in self.layer.named_parameters()]
        # A norm comes first, also where it is part of the linear layer that follows.
        for name in sorted(parameters, key=lambda name: plain_name(name) == name):
            names[prefix + plain_name(name)] = f"layer.{name}"
        return names

    def forward(self, hidden: Tensor | None, batch: PackedBatch) -> Tensor:
        """``[T, 1, H] -> [T, 1, H]``."""
        if hidden is None:
            raise ValueError("a layer needs the hidden states of the unit before it")
        context = self.context(batch, hidden.device)
        self._bda.context = context
        if self.group.sequence_parallel:
            mlp = self.unit.kind is Kind.MLP
            column = self.layer.mlp.linear_fc1 if mlp else self.layer.self_attention.linear_qkv
            column.tokens = context.tokens
        engine = self._engine
        passes = (
            nullcontext()
            if engine is None
            else engine.forward(context.tokens, training=self.training)
        )
        if self.norm is not None:
            hidden = self.norm(hidden)
        try:
            with passes:
                output, _ = self.layer(hidden, attention_mask=context)
        finally:
            self._bda.context = None
        return cast(Tensor, output)


def _construct(unit: Unit, config: ModelConfig, group: TensorGroup) -> Block:
    block: Block
    if unit.kind is Kind.EMBEDDING:
        block = EmbeddingBlock(unit, config, group)
    elif unit.kind is Kind.HEAD:
        block = HeadBlock(unit, config, group)
    else:
        block = LayerBlock(unit, config, group)
    return block.to(DTYPES[config.params_dtype])


def build_shell(unit: Unit, config: ModelConfig, *, group: TensorGroup = SOLO) -> Block:
    """Build a unit without memory for its parameters: they have shapes (meta device) only.

    For a device that holds the values elsewhere; ``bind`` each parameter before use. Arguments as
    for :func:`build_block`.
    """
    with torch.device("meta"), _Undrawn():
        return _construct(unit, config, group)


class _Undrawn(TorchFunctionMode):
    """Leaves random initial values out.

    On the meta device there is no memory for them, but PyTorch draws them in Python there, by code
    that loads its compiler: a second of each worker's start.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if getattr(function, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def build_block(unit: Unit, config: ModelConfig, *, group: TensorGroup = SOLO) -> Block:
    """Build a unit on the CPU with its initial values, which depend on (seed, slab) only.

    Args:
        unit: one of ``config.layers.units``.
        config: the model. Of Transformer Engine's modules, which compute on CUDA only, parameter
            names and initial values are the same.
        group: the workers that share the unit; this one's part of it is built.

    Raises:
        ImportError: Transformer Engine is not installed.
    """
    block = _construct(unit, config, group)
    if any(parameter.is_meta for parameter in block.parameters()):
        block.to_empty(device="cpu")
    for slab, parameters in block.slab_parameters().items():
        initialize(config, slab, parameters, group)
    return block
