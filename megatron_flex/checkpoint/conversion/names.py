"""Parameter names: Megatron's local layer specification against Transformer Engine's.

Transformer Engine fuses a norm with the linear layer that follows it, and names it so. Megatron's
distributed checkpoints use its names for both.
"""

from __future__ import annotations

_FUSED = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}


def to_transformer_engine(name: str) -> str:
    """``….input_layernorm.weight`` -> ``….self_attention.linear_qkv.layer_norm_weight``."""
    for local, fused in _FUSED.items():
        name = name.replace(local, fused)
    return name


def to_local(name: str) -> str:
    """The reverse of :func:`to_transformer_engine`; local names stay as they are."""
    for local, fused in _FUSED.items():
        name = name.replace(fused, local)
    return name
