"""Attention on CUDA: PyTorch's variable-length kernels, or flash-attn where PyTorch has none.

Both take 16-bit types only. float32 models (tests, small experiments) go through PyTorch's
memory-efficient attention, one call a sample.

A slice of a longer sample (always the first of a micro-batch) has a call of its own: its queries
against the keys of the sample up to its end, which are in the run's store. A causal mask then means
the last query and the last key, as in flash-attn's kernels; PyTorch's SDPA has a bias for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron_flex.model.attention_options import AttentionOptions
from megatron_flex.model.context import PackedContext


class Spans(Protocol):
    """Queries and keys of each sample: how many, and as ``[samples + 1]`` int32 offsets."""

    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def key_lengths(self) -> tuple[int, ...]: ...
    @property
    def cumulative_lengths(self) -> Tensor: ...
    @property
    def cumulative_key_lengths(self) -> Tensor: ...


@dataclass(frozen=True)
class _Spans:
    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    cumulative_lengths: Tensor
    cumulative_key_lengths: Tensor


_Kernel = Callable[[Tensor, Tensor, Tensor, Spans, AttentionOptions], Tensor]


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

    def run(q: Tensor, k: Tensor, v: Tensor, spans: Spans, o: AttentionOptions) -> Tensor:
        offsets, key_offsets = spans.cumulative_lengths, spans.cumulative_key_lengths
        most, most_keys = max(spans.lengths), max(spans.key_lengths)
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
        out: Tensor = varlen_attn(q, k, v, offsets, key_offsets, most, most_keys, **more)
        return out

    return run


def _flash_attn_kernel() -> _Kernel:
    try:
        import flash_attn
    except ImportError:
        return attend_per_sample
    varlen_attn: Callable[..., Tensor] = flash_attn.flash_attn_varlen_func

    def run(q: Tensor, k: Tensor, v: Tensor, spans: Spans, o: AttentionOptions) -> Tensor:
        offsets, key_offsets = spans.cumulative_lengths, spans.cumulative_key_lengths
        most, most_keys = max(spans.lengths), max(spans.key_lengths)
        return varlen_attn(
            q, k, v, offsets, key_offsets, most, most_keys, softmax_scale=o.scale, causal=o.causal
        )

    return run


def attend_per_sample(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, options: AttentionOptions
) -> Tensor:
    """One call of PyTorch's attention a sample; any device and floating type, no rotation."""
    outputs = []
    queries = query.transpose(0, 1).split(spans.lengths, dim=1)
    keys, values = (t.transpose(0, 1).split(spans.key_lengths, dim=1) for t in (key, value))
    for q, k, v in zip(queries, keys, values, strict=True):
        square = q.shape[1] == k.shape[1]
        bias = None
        if options.causal and not square:
            # Imported here: it loads the compiler, seconds and 70 MB for each worker.
            from torch.nn.attention.bias import causal_lower_right

            bias = causal_lower_right(q.shape[1], k.shape[1])
        grouped = q.shape[0] != k.shape[0]
        if grouped and bias is not None:  # the kernel for such a mask knows no groups
            k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], dim=0) for t in (k, v))
            grouped = False
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=bias, is_causal=options.causal and square,
            scale=options.scale, enable_gqa=grouped,
        )  # fmt: skip
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


class _SliceAttention(torch.autograd.Function):
    """A slice's queries against the store's keys; gradients of earlier keys go to the store.

    What the kernel saves for its own backward is in a graph within this one. The keys are in it as
    tensors that don't know of later writes to the store, which touch other rows.
    """

    @staticmethod
    def forward(ctx, query, key, value, context, options, kernel):  # type: ignore[no-untyped-def]
        cut = context.cut
        prefix = context.prefixes.write(options.layer, cut, key, value)
        leaves = [query.detach(), *(t.data[: cut.stop] for t in (prefix.keys, prefix.values))]
        back = any(ctx.needs_input_grad)
        if back:
            for leaf in leaves:
                leaf.requires_grad_()
        with torch.set_grad_enabled(back):
            output = kernel(*leaves, _spans_of_slice(context), options)
        context.prefixes.attended(options.layer, cut)
        if back:
            ctx.graph = leaves, get_gradient_edge(output)
        ctx.context, ctx.layer = context, options.layer
        return output.detach()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        context, cut = ctx.context, ctx.context.cut
        prefix = context.prefixes.going_back(ctx.layer, cut)
        leaves, edge = ctx.graph
        del ctx.graph
        grad_query, *grads = torch.autograd.grad(edge, leaves, grad)
        own = []
        for total, part in zip(prefix.sums(*prefix.keys.shape), grads, strict=True):
            total[: cut.stop] += part
            own.append(total[cut.start : cut.stop].to(part.dtype))
        context.prefixes.gone_back(ctx.layer, cut)
        return grad_query, *own, None, None, None


def _spans_of_slice(context: PackedContext) -> Spans:
    cut = context.cut
    assert cut is not None
    ends = torch.tensor(((0, cut.tokens), (0, cut.stop)), dtype=torch.int32, device=context.device)
    return _Spans((cut.tokens,), (cut.stop,), ends[0], ends[1])


def _spans_of_rest(context: PackedContext) -> Spans:
    lengths, offsets = context.lengths[1:], context.cumulative_lengths[1:] - context.lengths[0]
    return _Spans(lengths, lengths, offsets, offsets)


def _attend_slice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: PackedContext,
    options: AttentionOptions,
    kernel: _Kernel,
) -> Tensor:
    """The first sample is a slice; the whole samples beside it have a call of their own."""
    assert context.cut is not None
    # Views would keep the whole of the projection's output.
    rows = [context.cut.tokens, len(query) - context.cut.tokens]
    (query, others), (key, *more), (value, *most) = (t.split(rows) for t in (query, key, value))
    query = query.clone() if torch.is_grad_enabled() else query
    first: Tensor = _SliceAttention.apply(query, key, value, context, options, kernel)
    if not rows[1]:
        return first
    q, k, v = (t.clone() if torch.is_grad_enabled() else t for t in (others, *more, *most))
    return torch.cat((first, kernel(q, k, v, _spans_of_rest(context), options)))


def attend_padded(
    query: Tensor, key: Tensor, value: Tensor, context: PackedContext, options: AttentionOptions
) -> Tensor:
    """Padded samples that look both ways: one call for all, with a mask over the keys."""
    count = len(context.lengths)
    q, k, v = (t.unflatten(0, (count, -1)).transpose(1, 2) for t in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=context.key_mask, scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2).flatten(0, 1)


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
    if context.counted and not options.causal:
        return attend_padded(query, key, value, context, options)
    kernel = attend_per_sample if query.dtype is torch.float32 else _varlen_kernel()
    if context.cut is not None:
        return _attend_slice(query, key, value, context, options, kernel)
    return kernel(query, key, value, context, options)
