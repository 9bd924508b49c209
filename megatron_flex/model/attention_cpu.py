"""Attention on the CPU: one native call for all samples of a micro-batch, forward and backward.

Scores exist only in small blocks, so memory is linear in the length; the mask of attention dropout
is hashed again in the backward pass. See ``kernels/src/attention.cpp``.

Of a slice (always the first of a micro-batch) keys and values are in the run's store, gradients of
earlier ones go there too.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch

from megatron_flex.model.attention_options import AttentionOptions
from megatron_flex.model.context import PackedContext
from megatron_flex.model.keys import attention_site, site_key, threshold
from megatron_flex.model.prefix import Prefix
from megatron_flex.native import function

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
_LANES = 16  # rows of gradients in the store are a multiple of so many numbers

_ADDRESSES = (
    "query", "key", "value", "output", "lse", "grad_output", "grad_query", "grad_key",
    "grad_value", "offsets", "counted", "cosine", "sine", "token_keys", "sites",
)  # fmt: skip
_SIZES = (
    "samples", "tokens", "heads", "groups", "depth", "query_stride", "key_stride", "value_stride",
    "query_head_stride", "key_head_stride", "value_head_stride", "rotary_half",
)  # fmt: skip
_PREFIX_ADDRESSES = (
    "prefix_key", "prefix_value", "prefix_grad_key", "prefix_grad_value", "prefix_cosine",
    "prefix_sine",
)  # fmt: skip
_PREFIX_SIZES = ("prefix_start", "prefix_tokens", "key_shift")


class _Arguments(ctypes.Structure):
    """``mflex_attention`` of ``kernels/src/attention.cpp``, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _ADDRESSES),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in _PREFIX_ADDRESSES),
        *((name, ctypes.c_int64) for name in _PREFIX_SIZES),
        ("scale", ctypes.c_float),
        ("keep_scale", ctypes.c_float),
        ("threshold", ctypes.c_uint32),
        ("causal", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


@cache
def _sites(layer: int, first: int, heads: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Key of each head's probabilities; cached, so its address stays valid."""
    site = attention_site(layer)
    keys = [site_key(site, head) for head in range(first, first + heads)]
    return np.array(keys, dtype=np.uint64)


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    context: PackedContext,
    options: AttentionOptions,
    grads: tuple[torch.Tensor, ...] = (),
    prefix: Prefix | None = None,
) -> None:
    """The forward pass, or with ``grads`` (of output, query, key, value) the backward pass.

    With a ``prefix`` the first sample is a slice; ``key`` and ``value`` may lack its rows.
    """
    tokens, heads, depth = query.shape
    offsets, dropout = context.offsets_array, options.dropout
    # A causal mask hides padding already: it comes after all that counts.
    counted = None if options.causal else context.counted_array
    cosine, sine = context.rotary if options.rotary else (None, None)
    a = _Arguments(
        *(t.data_ptr() for t in (query, key, value, output, lse)),
        *((t.data_ptr() for t in grads) if grads else (None,) * 4),
        offsets.ctypes.data,
        None if counted is None else counted.ctypes.data,
        None if cosine is None else cosine.data_ptr(),
        None if sine is None else sine.data_ptr(),
        context.token_keys.data_ptr() if dropout > 0.0 else None,
        _sites(options.layer, options.first_head, heads).ctypes.data if dropout > 0.0 else None,
        len(offsets) - 1, tokens, heads, key.shape[1], depth,
        query.stride(0), key.stride(0), value.stride(0),
        query.stride(1), key.stride(1), value.stride(1),
        0 if cosine is None else cosine.shape[1],
        *_prefix_arguments(context, options, prefix, bool(grads)), tokens - len(key),
        options.scale, 1.0 / (1.0 - dropout), threshold(dropout),
        options.causal, DTYPE_CODES[query.dtype], torch.get_num_threads(),
    )  # fmt: skip
    status = function("mflex_attention_run")(ctypes.byref(a))
    if status != 0:
        raise MemoryError(
            f"no memory for the attention of a sample of {context.longest} tokens: lower"
            " --max-sample-length or give the process more memory"
        )


def _prefix_arguments(
    context: PackedContext, options: AttentionOptions, prefix: Prefix | None, back: bool
) -> tuple[int | None, ...]:
    """All ``prefix_`` fields in order."""
    if prefix is None:
        return (*(None,) * 6, 0, 0)
    assert context.cut is not None
    tokens, groups, depth = prefix.keys.shape
    sums: tuple[torch.Tensor | None, ...] = (None, None)
    if back:
        sums = prefix.sums(groups, tokens, -(-depth // _LANES) * _LANES)
    tables = context.prefix_rotary if options.rotary else (None, None)
    tensors = (prefix.keys, prefix.values, *sums, *tables)
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    return (*addresses, context.cut.start, tokens)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def saved_beside_a_slice(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the backward needs where the first ``rows`` keys and values are in the store.

    The three come as views of one projection's output. Copies let it go, unless norms of heads have
    saved it anyway.
    """
    lets_go = _same_memory(key, value)
    if lets_go and _same_memory(query, value):
        query = query.clone(memory_format=torch.contiguous_format)
    key, value = key[rows:], value[rows:]
    key = key.clone(memory_format=torch.contiguous_format)
    if lets_go or not len(value):
        value = value.clone(memory_format=torch.contiguous_format)
    return query, key, value


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, context, options):  # type: ignore[no-untyped-def]
        query, key, value = _rows(query), _rows(key), _rows(value)
        output = torch.empty(query.shape, dtype=query.dtype)
        lse = torch.empty(query.shape[1], query.shape[0], dtype=torch.float32)
        cut, prefix = context.cut, None
        if cut is not None:
            rows = cut.tokens
            prefix = context.prefixes.write(options.layer, cut, key[:rows], value[:rows])
        _run(query, key, value, output, lse, context, options, prefix=prefix)
        if cut is not None:
            context.prefixes.attended(options.layer, cut)
            if any(ctx.needs_input_grad):
                query, key, value = saved_beside_a_slice(query, key, value, rows)
        ctx.context, ctx.options = context, options
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        query, key, value, output, lse = ctx.saved_tensors
        context, options, shape = ctx.context, ctx.options, (len(query), *key.shape[1:])
        cut, prefix = context.cut, None
        if cut is not None:
            prefix = context.prefixes.going_back(options.layer, cut)
        grads = [torch.empty(size, dtype=query.dtype) for size in (query.shape, shape, shape)]
        grad = grad.contiguous()
        _run(query, key, value, output, lse, context, options, (grad, *grads), prefix)
        if cut is not None:
            context.prefixes.gone_back(options.layer, cut)
        return *grads, None, None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: PackedContext,
    options: AttentionOptions,
) -> torch.Tensor:
    """Query ``[T, heads, d]``, key and value ``[T, groups, d]`` -> ``[T, heads, d]``.

    float32 or bfloat16; sums are float32. Rotary embedding and dropout are part of it. Raises
    ``MemoryError`` if the scratch memory (linear in the longest sample) cannot be had.
    """
    output: torch.Tensor = _Attention.apply(query, key, value, context, options)
    return output
