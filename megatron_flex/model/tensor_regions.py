"""Where hidden states pass from the workers of a tensor-parallel group to all of them, and back.

With autograd. megatron-core's own mappings of the same kind take their memory from the current CUDA
device. What happens before a product of a column-parallel layer is part of it (``tape.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_flex.model.tensor_group import TensorGroup


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.mark_dirty(x)
        return group.sum(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


def add_up(x: Tensor, group: TensorGroup) -> Tensor:
    """The sum of ``x`` over the group, in place."""
    out: Tensor = _AddUp.apply(x, group)
    return out


class _ToRows(torch.autograd.Function):
    """From ``[T, ...]`` to this worker's rows: the gradients of all rows come together again."""

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.group.gather(grad)[: ctx.tokens], None


class _AddUpRows(_ToRows):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group, ctx.tokens = group, x.shape[0]
        return group.begin_shared_sum(x).wait()


def leave(x: Tensor, group: TensorGroup) -> Tensor:
    """What ends a row-parallel layer: the sum over the group of ``[T, ...]``, which is overwritten.

    With sequence parallelism each worker gets its own rows of it.
    """
    if not group.sequence_parallel:
        return add_up(x, group)
    out: Tensor = _AddUpRows.apply(x, group)
    return out


class _Divide(_ToRows):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group, ctx.tokens = group, x.shape[0]
        return group.share(x)


def divide(x: Tensor, group: TensorGroup) -> Tensor:
    """This worker's rows of what all workers of the group have: ``[T, ...]``."""
    out: Tensor = _Divide.apply(x, group)
    return out


class _Unite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, tokens):  # type: ignore[no-untyped-def]
        ctx.group = group
        return group.gather(x)[:tokens]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.group.share(grad), None, None


def unite(x: Tensor, group: TensorGroup, tokens: int) -> Tensor:
    """All ``tokens`` rows, for what every worker of the group computes alike afterwards.

    So the gradients that come back are alike too, and each takes its own rows.
    """
    out: Tensor = _Unite.apply(x, group, tokens)
    return out
