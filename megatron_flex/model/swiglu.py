"""SwiGLU that keeps only its input: megatron-core's plain form keeps twice as much."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_flex.native import function

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


def _native(x: Tensor, grad: Tensor | None, out: Tensor) -> Tensor:
    columns = x.shape[-1] // 2
    function("mflex_swiglu")(
        x.data_ptr(),
        None if grad is None else grad.data_ptr(),
        x.numel() // (2 * columns),
        columns,
        _DTYPE_CODES[x.dtype],
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        x = x.contiguous()
        ctx.save_for_backward(x)
        if x.device.type == "cpu" and x.dtype in _DTYPE_CODES:
            return _native(x, None, x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        if x.device.type == "cpu" and x.dtype in _DTYPE_CODES:
            return _native(x, grad.contiguous(), torch.empty_like(x))
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.mul(grad, silu(gate), out=grad_up)
        return out


class SwiGLU(torch.nn.Module):
    """``activation_func`` of megatron-core's MLP: ``[..., 2 F] -> [..., F]``."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """``silu(first half) * second half``."""
        out: Tensor = _SwiGLU.apply(x)
        return out
