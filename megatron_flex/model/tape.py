"""Linear layers and tables whose weights' gradients can wait: what a split backward is made of.

The backward of each computes the gradient of its input. That of the weight is added to ``.grad`` at
once, or, where the forward ran under a tape, when the tape runs: the weight half. Both ways add the
same product in the same order, so a split backward gives the bits of a fused one.

One-dimensional gradients (biases; norms are plain autograd) are never put off: a slab's gradient in
``[0, decayed)`` belongs to the weight half, the rest to the input half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_flex.model.tensor_group import TensorGroup


class Tape:
    """The gradients of weights that one pass of one stage still owes, in the order of its backward.

    Until it runs it keeps what they are made of: the inputs of the layers and the gradients of
    their outputs.
    """

    def __init__(self) -> None:
        self._owed: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        """How many gradients are owed."""
        return len(self._owed)

    def put(self, gradient: Callable[[], None]) -> None:
        """Have ``gradient()`` called when the tape runs."""
        self._owed.append(gradient)

    @torch.no_grad()
    def run(self) -> None:
        """Make the gradients, each but once, and let go of what it took."""
        while self._owed:
            self._owed.popleft()()


class _Recorder:
    """Says which tape forwards are recorded on. One object for all threads: on CUDA a recomputed
    forward runs on a thread of autograd's own."""

    tape: Tape | None = None


_RECORDER = _Recorder()


def recorded_on() -> Tape | None:
    """The tape that forwards are recorded on now."""
    return _RECORDER.tape


@contextmanager
def recording(tape: Tape | None) -> Iterator[None]:
    """The backward of forwards in this context owes its weights' gradients to ``tape``.

    Without a tape, and outside of this context, it makes them itself.
    """
    before, _RECORDER.tape = _RECORDER.tape, tape
    try:
        yield
    finally:
        _RECORDER.tape = before


@cache
def _narrow_is_slow() -> bool:
    """Whether this CPU multiplies bfloat16 matrices element by element.

    Where oneDNN has no kernels (no AVX-512), a transposed operand takes 7 to 20 times as long, and
    the gradient of an input up to 100 times, as with copies of the operands in float32.
    """
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _operands(*matrices: Tensor) -> tuple[Tensor, ...]:
    """The matrices in a type in which their product is fast."""
    first = matrices[0]
    if first.dtype is torch.bfloat16 and first.device.type == "cpu" and _narrow_is_slow():
        return tuple(m.float() for m in matrices)
    return matrices


def _settle(weight: Tensor, tape: Tape | None, add: Callable[[Tensor], object]) -> None:
    """Have ``add`` called with the sum of the weight's gradients: now, or when the tape runs."""

    def gradient() -> None:
        if weight.grad is None:  # a parameter outside of slabs
            weight.grad = torch.zeros_like(weight)
        add(weight.grad)

    if tape is None:
        gradient()
    else:
        tape.put(gradient)


class _Linear(torch.autograd.Function):
    # The weight stays on ctx: saved-tensor hooks would give back a tensor without ``.grad``.
    @staticmethod
    def forward(ctx, x, weight, bias, rows, group, tokens):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.weight, ctx.rows, ctx.tape = weight, rows, _RECORDER.tape
        ctx.group, ctx.tokens = group, tokens
        if group is not None and group.sequence_parallel:
            x = group.gather(x)[:tokens]
        return functional.linear(x, weight[:rows], None if bias is None else bias[:rows])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        weight, rows, group = ctx.weight, ctx.rows, ctx.group
        # A saved tensor comes with its graph, which leads to the stage's input and its gradient:
        # on a tape they would stay until the weight half.
        x = x.detach()
        shared = group is not None and group.sequence_parallel
        if shared:  # nothing is exchanged in a weight half
            x = group.gather(x)[: ctx.tokens]
        flat, x = grad.flatten(0, -2), x.flatten(0, -2)
        grad_x = grad_bias = summing = None
        if ctx.needs_input_grad[0]:
            wide, used = _operands(flat, weight[:rows])
            grad_x = wide.mm(used).to(grad.dtype).view(*grad.shape[:-1], -1)
            if group is not None:
                summing = group.begin_shared_sum(grad_x) if shared else group.begin_sum(grad_x)
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0)
            if rows is not None and rows < len(weight):
                grad_bias = functional.pad(grad_bias, (0, len(weight) - rows))

        def add(total: Tensor) -> None:
            wide, narrow = _operands(flat, x)
            total = total[:rows]
            if total.dtype is wide.dtype:
                total.addmm_(wide.t(), narrow)
            else:
                total.add_(wide.t().mm(narrow))

        if ctx.needs_input_grad[1]:
            _settle(weight, ctx.tape, add)
        if summing is not None:
            grad_x = summing.wait()
        return grad_x, None, grad_bias, None, None, None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, indices, weight, first):  # type: ignore[no-untyped-def]
        absent = None
        if first is not None:
            indices = indices - first
            absent = (indices < 0) | (indices >= len(weight))
            indices = indices.masked_fill(absent, 0)
        ctx.save_for_backward(indices, absent)
        ctx.weight, ctx.tape = weight, _RECORDER.tape
        out = functional.embedding(indices, weight)
        return out if absent is None else out.masked_fill_(absent[:, None], 0.0)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        indices, absent = ctx.saved_tensors
        if absent is not None and grad.device.type == "cpu":
            here = ~absent
            indices, grad = indices[here], grad[here]
        elif absent is not None:  # their number would have to be waited for
            grad = grad.masked_fill(absent[:, None], 0.0)

        def add(total: Tensor) -> None:
            # Only rows that were looked up are touched: autograd's own way makes a whole table.
            if total.device.type == "cpu":
                total.index_add_(0, indices, grad.to(total.dtype))
            else:  # here the order of additions is fixed
                total.index_put_((indices,), grad.to(total.dtype), accumulate=True)

        if ctx.needs_input_grad[1]:
            _settle(ctx.weight, ctx.tape, add)
        return None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    rows: int | None = None,
    group: TensorGroup | None = None,
    tokens: int | None = None,
) -> Tensor:
    """``[..., input] -> [..., output]`` by a parameter; with ``rows``, by its first rows only.

    Args:
        x: the input.
        weight: ``[output, input]``.
        bias: ``[output]``.
        rows: outputs that are wanted.
        group: workers that each have some of the outputs. The gradient of ``x`` is summed over
            them, while that of the weight is made. With sequence parallelism each has a share of
            the rows of ``x``, which are gathered, in the backward again.
        tokens: how many there are together then.
    """
    out: Tensor = _Linear.apply(x, weight, bias, rows, group, tokens)
    return out


def lookup(indices: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """``[T]`` rows of a table, which is a parameter -> ``[T, width]``.

    ``first``: the parameter has rows of the table from there on only; others come as zeros.
    """
    out: Tensor = _Lookup.apply(indices, weight, first)
    return out


class Linear(nn.Linear):
    """PyTorch's, with :func:`linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """``[..., input] -> [..., output]``."""
        return linear(input, self.weight, self.bias)
