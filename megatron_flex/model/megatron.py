"""What megatron-core needs to build a half of a transformer layer: configuration and specs.

Nothing here reads megatron-core's global state (``parallel_state``): process groups are passed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import gelu, silu

from megatron_flex.imports import quick_import
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.model.swiglu import SwiGLU
from megatron_flex.model.tape import linear
from megatron_flex.model.tensor_group import SOLO, TensorGroup
from megatron_flex.model.tensor_regions import leave

with quick_import():
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

__all__ = [
    "DTYPES",
    "LOCAL",
    "AttnMaskType",
    "BertLMHead",
    "ColumnLinear",
    "IdentityOp",
    "LanguageModelEmbedding",
    "LayerModules",
    "ModuleSpec",
    "Pooler",
    "ProcessGroupCollection",
    "Ranks",
    "RowLinear",
    "TransformerConfig",
    "WrappedTorchNorm",
    "core_config",
    "half_layer",
    "plain_name",
    "transformer_config",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Ranks:
    """What megatron-core asks of a tensor-parallel process group: sizes and places, no messages.

    With a group of one no ``parallel_state`` and no ``torch.distributed`` is needed.
    """

    def __init__(self, group: TensorGroup = SOLO) -> None:
        self.group = group

    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    def rank(self) -> int:
        """This process's rank."""
        return self.group.index

    @property
    def shared(self) -> TensorGroup | None:
        """The group, if there is anybody else in it."""
        return self.group if self.group.size > 1 else None


class ColumnLinear(ColumnParallelLinear):
    """megatron-core's column-parallel linear, as one node of autograd.

    Its own forward needs ``torch.distributed``, and CUDA for sequence parallelism, makes the
    weight's gradient at once, and adds the bias in a second pass over the output; here the bias is
    part of the product, also where megatron-core leaves it to the caller.

    Attributes:
        tokens: with sequence parallelism, how many all workers of the group have together; the
            block says it before it runs the layer.
    """

    tokens: int | None = None

    def __init__(self, *arguments: Any, tp_group: Ranks, **keywords: Any) -> None:
        super().__init__(*arguments, tp_group=tp_group, **keywords)
        self.group = tp_group.shared

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[T, 1, input] -> [T, 1, output]``, and the bias that is left to the caller."""
        weight = self.weight if weight is None else weight
        return linear(input_, weight, self.bias, group=self.group, tokens=self.tokens), None


class RowLinear(RowParallelLinear):
    """megatron-core's row-parallel linear, without its detours while the group has size one.

    The bias stays with the caller, whose bias-dropout-add takes it in the same pass.
    """

    def __init__(self, *arguments: Any, tp_group: Ranks, **keywords: Any) -> None:
        super().__init__(*arguments, tp_group=tp_group, **keywords)
        self.group = tp_group.shared

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[T, 1, input] -> [T, 1, output]``, and the bias that is left to the caller."""
        group = self.group
        if group is None and not self.skip_bias_add:
            return linear(input_, self.weight, self.bias), None
        out = linear(input_, self.weight)
        if group is not None:
            out = leave(out, group)
        if self.skip_bias_add or self.bias is None:
            return out, self.bias
        return out + self.bias, None


# Where Transformer Engine fuses a norm into the linear that follows, and Megatron's plain name.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def plain_name(name: str) -> str:
    """A parameter's name within its layer, the same for every kind of modules."""
    for fused, plain in _FUSED_NORMS.items():
        if name.startswith(fused):
            return plain + name.removeprefix(fused)
    return name


def _activation(config: ModelConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    if config.swiglu:
        return silu
    return partial(gelu, approximate="tanh") if config.openai_gelu else gelu


@cache
def transformer_config(config: ModelConfig) -> TransformerConfig:
    """The megatron-core configuration of ``config``, for the modules that run anywhere."""
    return core_config(config, use_cpu_initialization=True)


def core_config(config: ModelConfig, **more: Any) -> TransformerConfig:
    """A megatron-core configuration of ``config``; ``more`` are fields of its own.

    Initial values are ours (``initialize.py``), so its own initialisation is off. Its fusions are
    off: they go through ``torch.compile``, which needs a compiler on the machine that trains.
    """
    with warnings.catch_warnings():
        # A default of its own is deprecated.
        warnings.simplefilter("ignore")
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
            activation_func=_activation(config),
            add_bias_linear=config.add_bias_linear,
            add_qkv_bias=config.add_qkv_bias,
            qk_layernorm=config.qk_layernorm,
            hidden_dropout=config.hidden_dropout,
            attention_dropout=config.attention_dropout,
            init_method_std=config.init_method_std,
            params_dtype=DTYPES[config.params_dtype],
            perform_initialization=False,
            bias_activation_fusion=False,
            # The MLP then calls the activation of its spec (ours) on the whole of the input.
            use_te_activation_func=config.swiglu,
            bias_dropout_fusion=False,
            **more,
        )


@dataclass(frozen=True)
class LayerModules:
    """The classes that a layer is built from.

    Attributes:
        norm: before the attention and the MLP; ``IdentityOp`` where ``column`` has it.
        alone: a norm that stands alone: of queries and keys, and the final one.
        core: megatron-core's configuration for these classes.
        shared: workers may share a layer of them.
    """

    norm: type
    column: type
    row: type
    alone: type
    core: Callable[[ModelConfig], TransformerConfig]
    shared: bool = True


LOCAL = LayerModules(
    WrappedTorchNorm, ColumnLinear, RowLinear, WrappedTorchNorm, transformer_config
)


def half_layer(
    config: ModelConfig,
    kind: Kind,
    layer: int,
    core_attention: type[torch.nn.Module],
    bias_dropout_add: ModuleSpec,
    modules: LayerModules = LOCAL,
    group: TensorGroup = SOLO,
) -> TransformerLayer:
    """A ``TransformerLayer`` of which only the attention or only the MLP half is there.

    The other half stays at megatron-core's ``IdentityOp``; two halves equal the whole layer.
    ``layer`` counts from 0. Raises ``ValueError`` if a ``group`` is to share modules that cannot.
    """
    tensor: Ranks | None = Ranks(group)
    if not modules.shared:
        if group.size > 1:
            raise ValueError("Transformer Engine's modules are not shared: give no group")
        tensor = None  # it asks torch.distributed about its group: "no group" means one rank
    if kind is Kind.ATTENTION:
        mask = AttnMaskType.causal if config.causal else AttnMaskType.padding
        qk_norm = modules.alone if config.qk_layernorm else IdentityOp
        submodules = TransformerLayerSubmodules(
            input_layernorm=modules.norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": mask},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=modules.column,
                    core_attention=core_attention,
                    linear_proj=modules.row,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=bias_dropout_add,
        )
    else:
        submodules = TransformerLayerSubmodules(
            pre_mlp_layernorm=modules.norm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=modules.column,
                    linear_fc2=modules.row,
                    activation_func=SwiGLU if config.swiglu else None,
                ),
            ),
            mlp_bda=bias_dropout_add,
        )
    solo = Ranks()
    with warnings.catch_warnings():
        # megatron-core reminds itself to pass the MLP's width.
        warnings.simplefilter("ignore")
        return TransformerLayer(
            modules.core(config),
            submodules,
            layer_number=layer + 1,
            pg_collection=ProcessGroupCollection(tp=tensor, cp=solo, pp=solo),
        )
