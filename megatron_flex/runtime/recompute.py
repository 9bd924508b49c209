"""Recompute: a block keeps its input only, and runs again when its backward comes.

A block is a function of (hidden, batch) alone, and dropout is keyed by sample and position, so the
second run gives the same bits at any time; no state of a random generator is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.block import Block


class _Recomputed(torch.autograd.Function):
    """Forward without a graph; backward makes the graph of this one block and runs through it."""

    @staticmethod
    def forward(ctx, hidden, block, batch):  # type: ignore[no-untyped-def]
        ctx.block, ctx.batch = block, batch
        ctx.save_for_backward(hidden)
        return block(hidden, batch)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (hidden,) = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            output = get_gradient_edge(ctx.block(hidden, ctx.batch))
        # The gradients of the weights are accumulated where they always are.
        torch.autograd.backward(output, grad)
        return hidden.grad, None, None


def recomputed(block: Block, hidden: Tensor, batch: PackedBatch) -> Tensor:
    """``block(hidden, batch)``, of which only ``hidden`` is kept for the backward pass.

    ``hidden`` must require a gradient. The whole backward of the block, weights included, happens
    when the gradient of ``hidden`` is asked for.
    """
    output: Tensor = _Recomputed.apply(hidden, block, batch)
    return output
