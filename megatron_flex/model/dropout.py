"""Hidden dropout keyed by sample and position: bias, dropout and residual in one pass.

No mask is kept: the backward pass hashes the same bits again. Native kernels do it at the speed of
memory on the CPU and on CUDA; the same arithmetic in torch operations gives the same bits anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from megatron_flex import native
from megatron_flex.model.context import PackedContext
from megatron_flex.model.keys import keep_mask, site_key, threshold
from megatron_flex.model.tensor_group import SOLO, TensorGroup

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


@cache
def _has_cuda_kernel() -> bool:
    return bool(native.function("mflex_built_with_cuda")())


def masked_scale(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    keys: Tensor,
    site: int,
    probability: float,
) -> Tensor:
    """``residual + dropout(x + bias)`` without autograd.

    Args:
        x: ``[..., H]`` with as many rows as there are ``keys``.
        bias: ``[H]`` or ``None``.
        residual: as ``x``, or ``None``.
        keys: ``[T]`` int64 key of each token.
        site: the place in the model, see ``keys.py``.
        probability: of an element to be dropped; the others are divided by its complement.

    Raises:
        RuntimeError: CUDA refused the launch.
    """
    cuda = x.device.type == "cuda"
    if x.dtype not in _DTYPE_CODES or not (x.device.type == "cpu" or (cuda and _has_cuda_kernel())):
        return masked_scale_torch(x, bias, residual, keys, site, probability)
    x = x.contiguous()
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    residual = None if residual is None else residual.to(x.dtype).contiguous()
    out = torch.empty_like(x)
    columns = x.shape[-1]
    arguments = (
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        keys.data_ptr(),
        site_key(site),
        x.numel() // columns,
        columns,
        threshold(probability),
        1.0 / (1.0 - probability),
        _DTYPE_CODES[x.dtype],
        out.data_ptr(),
    )
    if not cuda:
        native.function("mflex_bias_dropout_add")(*arguments, torch.get_num_threads())
        return out
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream(x.device).cuda_stream
        code = native.function("mflex_cuda_bias_dropout_add")(*arguments, stream)
    if code != 0:
        text = native.function("mflex_cuda_error_text")(code).decode()
        raise RuntimeError(f"the dropout kernel could not be started on {x.device}: {text}")
    return out


def masked_scale_torch(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    keys: Tensor,
    site: int,
    probability: float,
) -> Tensor:
    """:func:`masked_scale` in torch operations: the same bits on every device."""
    columns = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
    keep = keep_mask(keys, site_key(site), columns, probability).view(x.shape)
    y = x.float()
    if bias is not None:
        y = y + bias.float()
    y = torch.where(keep, y * (1.0 / (1.0 - probability)), 0.0)
    if residual is not None:
        y = residual.float() + y
    return y.to(x.dtype)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, residual, keys, site, probability):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(keys)
        ctx.site, ctx.probability = site, probability
        ctx.bias_dtype = None if bias is None else bias.dtype
        return masked_scale(x, bias, residual, keys, site, probability)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (keys,) = ctx.saved_tensors
        grad_x = masked_scale(grad, None, None, keys, ctx.site, ctx.probability)
        grad_bias = None
        if ctx.bias_dtype is not None and ctx.needs_input_grad[1]:
            grad_bias = grad_x.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return grad_x, grad_bias, grad if ctx.needs_input_grad[2] else None, None, None, None


def keyed_dropout(
    x: Tensor,
    context: PackedContext,
    site: int,
    probability: float,
    group: TensorGroup = SOLO,
) -> Tensor:
    """Dropout of ``[T, 1, H]`` with autograd; of the rows that a worker of ``group`` has."""
    keys = context.keys_here(group)
    out: Tensor = _BiasDropoutAdd.apply(x, None, None, keys, site, probability)
    return out


class KeyedBiasDropoutAdd(torch.nn.Module):
    """``self_attn_bda`` / ``mlp_bda`` of a ``TransformerLayer``.

    megatron-core calls it without a word about the micro-batch, so the block hands over the
    context just before it runs the layer. It is read during that forward and never afterwards.
    """

    def __init__(self, site: int, group: TensorGroup = SOLO) -> None:
        super().__init__()
        self.site = site
        self.group = group
        self.context: PackedContext | None = None

    def forward(
        self, training: bool, fused: bool
    ) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """megatron-core's interface: gives the function of (x, bias), residual, probability."""
        context = self.context
        if context is None:
            raise RuntimeError("the block must set the context of the micro-batch before its layer")

        def bias_dropout_add(
            x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
        ) -> Tensor:
            x, bias = x_with_bias
            if not training or probability == 0.0:
                return residual + (x if bias is None else x + bias)
            out: Tensor = _BiasDropoutAdd.apply(
                x, bias, residual, context.keys_here(self.group), self.site, probability
            )
            return out

        return bias_dropout_add
