"""The workers that share the layers of one device, and what they exchange while it computes.

Every worker of a group runs the same list, so all come to the same exchanges in the same order.
Sums are begun and waited for, so that a product may run in between. The group is passed around,
never global.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class TensorGroupError(RuntimeError):
    """Another worker of the group is gone or silent."""


@dataclass(frozen=True)
class Sum:
    """A sum over a group that has begun; :meth:`wait` gives it."""

    work: Any
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """The sum. Raises :class:`TensorGroupError`."""
        if self.work is not None:
            with _explained():
                self.work.wait()
        return self.finish()


@dataclass(frozen=True)
class TensorGroup:
    """One worker's place in its group.

    Attributes:
        index: this worker's number in the group.
        size: number of workers.
        group: their process group. ``None``: nothing is exchanged, and sums are this worker's own;
            a group of one, or one of which only shapes and bytes count.
        scatters: the library sums to shares faster than to the whole. (gloo's reduce-scatter takes
            two to three times as long as its all-reduce, torch 2.13.)
        sequence_parallel: where layers are not divided, each worker has a share of the tokens
            (Megatron's sequence parallelism).
    """

    index: int = 0
    size: int = 1
    group: Any = None
    scatters: bool = False
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.size == 1 and self.sequence_parallel:
            raise ValueError("a group of one has no tokens to divide")

    def rows(self, tokens: int) -> int:
        """Rows of a hidden state of so many tokens that are here."""
        return -(-tokens // self.size) if self.sequence_parallel else tokens

    def begin_sum(self, x: Tensor) -> Sum:
        """Begin to sum ``x`` over the group, in place; it must be contiguous."""
        work = None
        if self.group is not None:
            with _explained():
                work = self.group.allreduce([x])
        return Sum(work, lambda: x)

    def sum(self, x: Tensor) -> Tensor:
        """``x``, which is contiguous, summed over the group in place."""
        return self.begin_sum(x).wait()

    def gather(self, x: Tensor) -> Tensor:
        """``[n, ...]`` of each worker -> ``[size * n, ...]``, in the order of the workers."""
        if self.group is None:
            return torch.cat([x] * self.size)
        x = x.contiguous()
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        with _explained():
            self.group._allgather_base(out, x).wait()
        return out

    # ---- messages ----------------------------------------------------------------------------

    def share_elements(self, elements: int) -> int:
        """Elements of a worker's share of a message of so many."""
        return -(-elements // self.size)

    def share_of_message(self, x: Tensor) -> Tensor:
        """This worker's share of what all have, flat; with zeros after the last element."""
        flat, count = x.flatten(), self.share_elements(x.numel())
        own = flat[self.index * count : (self.index + 1) * count]
        missing = count - own.numel()
        return torch.cat([own, own.new_zeros(missing)]) if missing else own

    def whole_message(self, share: Tensor, shape: Sequence[int]) -> Tensor:
        """The message of which each worker has its share."""
        return self.gather(share)[: math.prod(shape)].view(shape)

    # ---- shares of the tokens ----------------------------------------------------------------

    def share(self, x: Tensor) -> Tensor:
        """A copy of this worker's rows of ``[T, ...]``, with zeros after the last token of all."""
        rows = self.rows(x.shape[0])
        own = x[self.index * rows : (self.index + 1) * rows]
        missing = rows - own.shape[0]
        # A copy: a view would keep all rows.
        return torch.cat([own, own.new_zeros(missing, *own.shape[1:])]) if missing else own.clone()

    def begin_shared_sum(self, x: Tensor) -> Sum:
        """Begin to sum ``[T, ...]`` over the group: each worker gets the sum of its own rows.

        ``x`` may be overwritten.
        """
        x = x.contiguous()
        if not self.scatters:
            begun = self.begin_sum(x)
            return Sum(begun.work, lambda: self.share(x))
        rows = self.rows(x.shape[0])
        missing = rows * self.size - x.shape[0]
        if missing:
            x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
        own = x.new_empty(rows, *x.shape[1:])
        with _explained():
            work = self.group._reduce_scatter_base(own, x)
        return Sum(work, lambda: own)


SOLO = TensorGroup()
"""A worker that shares its layers with nobody."""


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TensorGroupError(str(error)) from error
