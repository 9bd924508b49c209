"""Attention on CUDA: PyTorch's variable-length kernels, or flash-attn where PyTorch has none.

Both take 16-bit types only. float32 models (tests, small experiments) go through PyTorch's
memory-efficient attention, one call a sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_flex.model.attention_options import AttentionOptions
from megatron_flex.model.context import PackedContext

_Kernel = Callable[[Tensor, Tensor, Tensor, PackedContext, AttentionOptions], Tensor]


@cache
def _varlen_kernel() -> _Kernel:
    """The variable-length kernel of this installation."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return _flash_attn_kernel()
    varlen_attn: Any = varlen.varlen_attn
    # The arguments differ between PyTorch's versions.
    names = inspect.signature(varlen_attn).parameters

    def run(q: Tensor, k: Tensor, v: Tensor, context: PackedContext, o: AttentionOptions) -> Tensor:
        offsets, longest = context.cumulative_lengths, max(context.lengths)
        more: dict[str, Any] = {}
        if "scale" in names:
            more["scale"] = o.scale
        else:  # the kernel's own is 1 / sqrt(d)
            q = q * (o.scale * q.shape[-1] ** 0.5)
        if "window_size" in names:
            more["window_size"] = (-1, 0 if o.causal else -1)
        else:
            more["is_causal"] = o.causal
        if "enable_gqa" in names:
            more["enable_gqa"] = True
        elif q.shape[1] != k.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        out: Tensor = varlen_attn(q, k, v, offsets, offsets, longest, longest, **more)
        return out

    return run


def _flash_attn_kernel() -> _Kernel:
    try:
        import flash_attn
    except ImportError:
        return attend_per_sample
    varlen_attn: Callable[..., Tensor] = flash_attn.flash_attn_varlen_func

    def run(q: Tensor, k: Tensor, v: Tensor, context: PackedContext, o: AttentionOptions) -> Tensor:
        offsets, longest = context.cumulative_lengths, max(context.lengths)
        return varlen_attn(
            q, k, v, offsets, offsets, longest, longest, softmax_scale=o.scale, causal=o.causal
        )

    return run


def attend_per_sample(
    query: Tensor, key: Tensor, value: Tensor, context: PackedContext, options: AttentionOptions
) -> Tensor:
    """One call of PyTorch's attention a sample; any device and floating type, no rotation."""
    outputs = []
    parts = (t.transpose(0, 1).split(context.lengths, dim=1) for t in (query, key, value))
    for q, k, v in zip(*parts, strict=True):
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=options.causal, scale=options.scale,
            enable_gqa=q.shape[0] != k.shape[0],
        )  # fmt: skip
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of ``[T, heads, d]`` by ``[T, rotary dimensions / 2]`` tables."""
    half = cosine.shape[1]
    cosine, sine = cosine[:, None].to(x.dtype), sine[:, None].to(x.dtype)
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine, rest), dim=-1)


def attend(
    query: Tensor, key: Tensor, value: Tensor, context: PackedContext, options: AttentionOptions
) -> Tensor:
    """Query ``[T, heads, d]``, key and value ``[T, groups, d]`` -> ``[T, heads, d]``.

    Raises ``ValueError`` for attention dropout, which no kernel here keys by sample.
    """
    if options.dropout > 0.0:
        raise ValueError("attention dropout keyed by sample needs the CPU: see check_attention")
    if options.rotary:
        query, key = (rotate(x, *context.rotary) for x in (query, key))
    kernel = attend_per_sample if query.dtype is torch.float32 else _varlen_kernel()
    return kernel(query, key, value, context, options)
