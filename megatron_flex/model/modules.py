"""Which classes the layers of a model are built from: by its flags, and by what is installed.

As Megatron-LM chooses: with ``--transformer-impl transformer_engine`` all is Transformer Engine's;
else LayerNorm is Apex's where that is installed, and every other norm PyTorch's. For weights to
which one is added (``--apply-layernorm-1p``) megatron-core has no plain norm; here is one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from megatron_flex.imports import quick_import
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.engine import engine_modules
from megatron_flex.model.megatron import (
    LOCAL,
    ColumnLinear,
    LayerModules,
    RowLinear,
    TransformerConfig,
    core_config,
)

with quick_import():
    from megatron.core.fusions import fused_layer_norm


class ApexNorm(fused_layer_norm.FusedLayerNorm):
    """megatron-core's, by Apex's kernels, which are for CUDA; elsewhere by PyTorch's."""

    def forward(self, input: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``."""
        if input.device.type != "cuda":
            weight = self.weight + 1 if self.zero_centered_gamma else self.weight
            return layer_norm(input, self.hidden_size, weight, self.bias, self.eps)
        out: Tensor = super().forward(input)
        return out


class OnePlusNorm(nn.Module):
    """LayerNorm or RMSNorm by PyTorch, which multiply by one plus their weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, input: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``."""
        weight = self.weight + 1
        if self.bias is None:
            return rms_norm(input, weight.shape, weight, self.eps)
        return layer_norm(input, weight.shape, weight, self.bias, self.eps)


@cache
def _apex_config(config: ModelConfig) -> TransformerConfig:
    return core_config(
        config,
        use_cpu_initialization=True,
        persist_layer_norm=config.persist_layer_norm,
        layernorm_zero_centered_gamma=config.apply_layernorm_1p,
    )


APEX = LayerModules(ApexNorm, ColumnLinear, RowLinear, ApexNorm, _apex_config)
ONE_PLUS = replace(LOCAL, norm=OnePlusNorm, alone=OnePlusNorm)


def apex_serves(config: ModelConfig, *, installed: bool, cuda: bool) -> bool:
    """Whether the norms of a model are Apex's."""
    return installed and cuda and config.normalization == "LayerNorm"


def layer_modules(config: ModelConfig) -> LayerModules:
    """The classes of a model's layers on this machine.

    Raises:
        ImportError: Transformer Engine is asked for, and is not there.
    """
    if config.transformer_impl == "transformer_engine":
        # In the first BERT's order the norm's output is added to, so it must be at hand.
        return engine_modules(fused=not config.apply_residual_connection_post_layernorm)
    installed = fused_layer_norm.HAVE_FUSED_LAYER_NORM
    if apex_serves(config, installed=installed, cuda=torch.cuda.is_available()):
        return APEX
    return ONE_PLUS if config.apply_layernorm_1p else LOCAL
