"""The output layer of a slice runs its backward at once, and keeps the gradient of its input only.

The backward of a slice waits for the forwards of all later slices of its sample. The logits of the
whole sample would be held until then, and they are by far the largest of all activations. But what
becomes of a token's logits depends on nothing but itself, and the scale of the loss is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.block import Block


class _Anticipated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, block, batch, scale):  # type: ignore[no-untyped-def]
        own = hidden.detach().requires_grad_()
        with torch.enable_grad():
            losses = block(own, batch)
        losses.backward(scale)
        ctx.save_for_backward(own.grad)
        return losses.detach()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors  # of losses that were scaled already
        return gradient, None, None, None


def anticipated(block: Block, hidden: Tensor, batch: PackedBatch, scale: Tensor) -> Tensor:
    """``block(hidden, batch)``: losses, whose backward has happened when this returns.

    Args:
        hidden: ``[T, 1, H]``; must require a gradient.
        scale: ``[losses]``, what each loss is multiplied by. The backward pass that follows must
            begin with it, too.
    """
    losses: Tensor = _Anticipated.apply(hidden, block, batch, scale)
    return losses
