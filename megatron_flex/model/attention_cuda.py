"""Attention on CUDA: PyTorch's variable-length kernels, or flash-attn where PyTorch has none.

Both take 16-bit types only. float32 models (tests, small experiments) go through PyTorch's
memory-efficient attention, one call a sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

import torch

from megatron_flex.model.context import PackedContext

_Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, PackedContext, bool, float], torch.Tensor
]


@cache
def _varlen_kernel() -> _Kernel | None:
    """The variable-length kernel of this installation, or ``None``."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return _flash_attn_kernel()
    windowed = "window_size" in inspect.signature(varlen_attn).parameters

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: PackedContext,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        offsets, longest = context.cumulative_lengths, max(context.lengths)
        mask = {"window_size": (-1, 0 if causal else -1)} if windowed else {"is_causal": causal}
        out: torch.Tensor = varlen_attn(
            query, key, value, offsets, offsets, longest, longest, scale=scale,
            **({"enable_gqa": True} if windowed else {}), **mask,
        )  # fmt: skip
        return out

    return run


def _flash_attn_kernel() -> _Kernel | None:
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    except ImportError:
        return None

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: PackedContext,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        offsets, longest = context.cumulative_lengths, max(context.lengths)
        out: torch.Tensor = flash_attn_varlen_func(
            query, key, value, offsets, offsets, longest, longest,
            softmax_scale=scale, causal=causal,
        )  # fmt: skip
        return out

    return run


def attend_per_sample(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: PackedContext,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """One call of PyTorch's attention a sample; any device and floating type."""
    outputs = []
    parts = (t.transpose(0, 1).split(context.lengths, dim=1) for t in (query, key, value))
    for q, k, v in zip(*parts, strict=True):
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=causal, scale=scale, enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: PackedContext,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Query ``[T, heads, d]``, key and value ``[T, groups, d]`` -> ``[T, heads, d]``."""
    kernel = _varlen_kernel() if query.dtype is not torch.float32 else None
    return (kernel or attend_per_sample)(query, key, value, context, causal, scale)
