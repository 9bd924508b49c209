"""Initial values by Megatron's init methods, keyed by (seed, slab): the same on every device.

Megatron draws from one generator in the order in which modules are built, so its values depend
on the layout; ours must not.
"""

from __future__ import annotations

import math

import torch

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.keys import mix
from megatron_flex.model.tensor_cut import Cut, cut_of, full_shape, pieces
from megatron_flex.model.tensor_group import SOLO, TensorGroup

# Megatron's output_layer_init_method: the two projections back into the residual stream.
_SCALED = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")


def initialize(
    config: ModelConfig,
    slab: int,
    parameters: dict[str, torch.nn.Parameter],
    group: TensorGroup = SOLO,
) -> None:
    """Fill the parameters of one slab, in the order given.

    Weights: normal, ``init_method_std``; the projections into the residual stream divided by
    ``sqrt(2 * num_layers)``. Norm weights: one, or zero where one is added. Biases: zero. Drawn in
    float32 on the CPU, in full, so that they do not depend on the number of workers that share a
    layer; each takes its pieces.
    """
    generator = torch.Generator()
    generator.manual_seed(mix(mix(config.seed) ^ (slab + 1)) >> 1)
    for name, parameter in parameters.items():
        with torch.no_grad():
            if name.endswith("bias"):
                parameter.zero_()
            elif "layernorm" in name or "layer_norm" in name:
                parameter.fill_(0.0 if config.apply_layernorm_1p else 1.0)
            else:
                std = config.init_method_std
                if name.endswith(_SCALED):
                    std /= math.sqrt(2.0 * config.num_layers)
                cut = cut_of(config, name)
                shape = full_shape(parameter.shape, cut, group.size)
                drawn = torch.empty(shape, dtype=torch.float32)
                take(parameter, drawn.normal_(0.0, std, generator=generator), cut, group)


def take(own: torch.Tensor, full: torch.Tensor, cut: Cut | None, group: TensorGroup) -> None:
    """Fill a worker's tensor with its pieces of the full one."""
    if cut is None or group.size == 1:
        own.copy_(full)
        return
    for piece in pieces(full.shape, cut, group.index, group.size):
        extent = piece.sizes[cut.dim]
        source = full.narrow(cut.dim, piece.offsets[cut.dim], extent)
        own.narrow(cut.dim, piece.local[cut.dim], extent).copy_(source)
