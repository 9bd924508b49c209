"""What megatron-core needs to build a half of a transformer layer: configuration and specs.

Nothing here reads megatron-core's global state (``parallel_state``): process groups are passed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.nn.functional import gelu, linear, silu

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.model.swiglu import SwiGLU


@contextlib.contextmanager
def _quick_import() -> Iterator[None]:
    """Import megatron-core without its warnings and without the compiler.

    It warns that it falls back to torch's norms where Apex is missing, and decorates its fused
    functions with ``torch.compile``, which loads the compiler: seconds and 70 MB for each worker.
    No such function is used here, so they stay as they are written.
    """

    def as_written(model: Any = None, **_: Any) -> Any:
        return (lambda function: function) if model is None else model

    compile_, torch.compile = torch.compile, as_written
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compile = compile_


with _quick_import():
    from megatron.core.models.bert.bert_lm_head import BertLMHead
    from megatron.core.models.bert.pooler import Pooler
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )
    from megatron.core.utils import get_pg_size

__all__ = [
    "DTYPES",
    "AttnMaskType",
    "BertLMHead",
    "ColumnLinear",
    "LanguageModelEmbedding",
    "ModuleSpec",
    "Pooler",
    "RowLinear",
    "SoloGroup",
    "TransformerConfig",
    "WrappedTorchNorm",
    "half_layer",
    "process_groups",
    "transformer_config",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class SoloGroup:
    """A process group of one: what megatron-core asks of a group that never communicates."""

    def size(self) -> int:
        """Number of ranks."""
        return 1

    def rank(self) -> int:
        """This process's rank."""
        return 0


def process_groups() -> ProcessGroupCollection:
    """Tensor, context and pipeline groups of size one; no ``parallel_state`` is needed."""
    solo = SoloGroup()
    return ProcessGroupCollection(tp=solo, cp=solo, pp=solo)


class ColumnLinear(ColumnParallelLinear):
    """megatron-core's column-parallel linear, without its detours while the group has size one.

    Its own forward needs ``torch.distributed`` and adds the bias in a second pass over the output;
    here the bias is part of the product, also where megatron-core leaves it to the caller.
    """

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[T, 1, input] -> [T, 1, output]``, and the bias that is left to the caller."""
        if get_pg_size(self.tp_group) > 1:
            return super().forward(input_, weight=weight, **kwargs)
        return linear(input_, self.weight if weight is None else weight, self.bias), None


class RowLinear(RowParallelLinear):
    """megatron-core's row-parallel linear, without its detours while the group has size one.

    The bias stays with the caller, whose bias-dropout-add takes it in the same pass.
    """

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[T, 1, input] -> [T, 1, output]``, and the bias that is left to the caller."""
        if get_pg_size(self.tp_group) > 1:
            return super().forward(input_)
        if self.skip_bias_add:
            return linear(input_, self.weight), self.bias
        return linear(input_, self.weight, self.bias), None


@cache
def transformer_config(config: ModelConfig) -> TransformerConfig:
    """The megatron-core configuration of ``config``.

    Initial values are ours (``initialize.py``), so its own initialisation is off. Its fusions are
    off: they go through ``torch.compile``, which needs a compiler on the machine that trains.
    """
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        ffn_hidden_size=config.ffn_hidden_size,
        normalization=config.normalization,
        layernorm_epsilon=config.norm_epsilon,
        gated_linear_unit=config.swiglu,
        activation_func=silu if config.swiglu else gelu,
        add_bias_linear=config.add_bias_linear,
        qk_layernorm=config.qk_layernorm,
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        init_method_std=config.init_method_std,
        params_dtype=DTYPES[config.params_dtype],
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        # The MLP then calls the activation of its spec, ours, instead of halving and multiplying.
        use_te_activation_func=config.swiglu,
        bias_dropout_fusion=False,
    )


def half_layer(
    config: ModelConfig,
    kind: Kind,
    layer: int,
    core_attention: type[torch.nn.Module],
    bias_dropout_add: ModuleSpec,
) -> TransformerLayer:
    """A ``TransformerLayer`` of which only the attention or only the MLP half is there.

    The other half stays at megatron-core's ``IdentityOp``; two halves equal the whole layer.
    """
    if kind is Kind.ATTENTION:
        norm = WrappedTorchNorm if config.qk_layernorm else IdentityOp
        submodules = TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={
                    "attn_mask_type": AttnMaskType.causal if config.causal else AttnMaskType.padding
                },
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnLinear,
                    core_attention=core_attention,
                    linear_proj=RowLinear,
                    q_layernorm=norm,
                    k_layernorm=norm,
                ),
            ),
            self_attn_bda=bias_dropout_add,
        )
    else:
        submodules = TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=ColumnLinear,
                    linear_fc2=RowLinear,
                    activation_func=SwiGLU if config.swiglu else None,
                ),
            ),
            mlp_bda=bias_dropout_add,
        )
    return TransformerLayer(
        transformer_config(config),
        submodules,
        layer_number=layer + 1,
        pg_collection=process_groups(),
    )
