"""Slabs: one contiguous buffer each for parameters, gradients and optimizer state.

Parameters are views into the buffer, so that a slab is copied, reduced, normed, updated and
checksummed in one operation, and moves to another device as one message (architecture decision:
a block is a slab).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

# Every parameter starts at a multiple of this many elements: 64 bytes in bfloat16, 128 in float32.
# Unaligned one-row products differ in their last bits.
ALIGNMENT = 32
# The whole slab is padded to this many elements, so that its norm is a sum over equal rows.
ROW = 1024


@dataclass(frozen=True)
class Entry:
    """One parameter's place in a slab: ``offset`` in elements."""

    name: str
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()


@dataclass(frozen=True)
class SlabLayout:
    """Where each parameter lies: weight-decayed ones in ``[0, decayed)``, the others after."""

    entries: tuple[Entry, ...]
    decayed: int
    numel: int

    @classmethod
    def of(
        cls, shapes: Iterable[tuple[str, torch.Size]], decays: Callable[[str, torch.Size], bool]
    ) -> SlabLayout:
        """Lay out parameters, given as (name, shape); ``decays`` says which are weight-decayed."""
        listed = list(shapes)
        entries: list[Entry] = []
        offset = decayed = 0
        for group in (True, False):
            for name, shape in listed:
                if decays(name, shape) is group:
                    entries.append(Entry(name, shape, offset))
                    offset = _round_up(offset + shape.numel(), ALIGNMENT)
            if group:
                decayed = offset
        return cls(tuple(entries), decayed, _round_up(offset, ROW))


class Slab:
    """The buffers of one slab on one device.

    Attributes:
        params: ``[numel]`` in the model's type. ``parameters`` are views of it by name.
        grads: ``[numel]`` float32 sum of gradients; autograd accumulates into views of it.
        master: ``[numel]`` float32 weights; the very same tensor as ``params`` for a float32 model.
        exp_avg, exp_avg_sq: ``[numel]`` float32 Adam moments.
        steps: updates applied so far.
    """

    def __init__(
        self, index: int, layout: SlabLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.index = index
        self.layout = layout
        self.steps = 0
        numel = layout.numel
        self.params = torch.zeros(numel, dtype=dtype, device=device)
        self.grads = torch.zeros(numel, device=device)
        mixed = dtype != torch.float32
        # One buffer for all optimizer state: it moves in one message.
        self.state = torch.zeros((3 if mixed else 2) * numel, device=device)
        self.exp_avg, self.exp_avg_sq = self.state[:numel], self.state[numel : 2 * numel]
        self.master = self.state[2 * numel :] if mixed else self.params
        self.parameters = {e.name: self._parameter(e) for e in layout.entries}

    def _parameter(self, entry: Entry) -> torch.nn.Parameter:
        # nn.Parameter(view), not .data: writes through the slab stay visible to autograd's
        # version counter.
        parameter = torch.nn.Parameter(self.view(self.params, entry))
        if self.params.dtype != torch.float32:
            parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
        parameter.grad = self.view(self.grads, entry)
        return parameter

    @staticmethod
    def view(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
        """The part of a slab-sized ``buffer`` that belongs to ``entry``, in its shape."""
        return buffer[entry.offset : entry.offset + entry.numel].view(entry.shape)

    def fill(self, values: dict[str, torch.Tensor]) -> None:
        """Copy initial values in, by parameter name, and start the master weights from them."""
        with torch.no_grad():
            for entry in self.layout.entries:
                self.view(self.params, entry).copy_(values[entry.name])
            self.sync_master()

    def sync_master(self) -> None:
        """Take the master weights from the parameters (after loading weights alone)."""
        if self.master is not self.params:
            self.master.copy_(self.params)

    def squared_norm(self) -> torch.Tensor:
        """Squared norm of the gradient, a float64 scalar.

        Rows in float32, their squares summed in float64: the layout of a slab does not depend on
        the plan, so neither do the bits of this sum.
        """
        rows = torch.linalg.vector_norm(self.grads.view(-1, ROW), dim=1)
        return rows.double().square().sum()

    def zeros(self) -> torch.Tensor:
        """Number of parameters whose gradient is zero; padding does not count."""
        return sum(
            ((self.view(self.grads, e) == 0).sum() for e in self.layout.entries),
            start=torch.zeros((), dtype=torch.int64, device=self.grads.device),
        )

    def named_state(self, *, model: bool = True, optimizer: bool = True) -> dict[str, torch.Tensor]:
        """Views of everything that a checkpoint holds, by name.

        Model tensors have Megatron's parameter names; optimizer tensors are
        ``optimizer.state.{exp_avg,exp_avg_sq,master}.<name>``, master only in mixed precision.
        """
        buffers = {"": self.params} if model else {}
        if optimizer:
            buffers["optimizer.state.exp_avg."] = self.exp_avg
            buffers["optimizer.state.exp_avg_sq."] = self.exp_avg_sq
            if self.master is not self.params:
                buffers["optimizer.state.master."] = self.master
        return {
            prefix + entry.name: self.view(buffer, entry)
            for prefix, buffer in buffers.items()
            for entry in self.layout.entries
        }


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
