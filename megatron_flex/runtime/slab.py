"""Slabs: one contiguous buffer each for parameters, gradients and optimizer state.

Parameters are views into the buffer, so that a slab is copied, reduced, normed, updated and
checksummed in one operation, and moves to another device as one message (architecture decision:
a block is a slab).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
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


@dataclass(frozen=True)
class Buffers:
    """The memory of one slab, reused by another of the same size.

    Attributes:
        state: ``[3 * numel]`` float32: master weights, then Adam's two moments. What travels. In
            host memory if ``offloaded``.
        grads: ``[numel]`` float32.
        params: ``[numel]`` in the model's type; for a float32 model a view of the master weights,
            unless these are offloaded.
        sums: ``[numel]`` int64 exact sums of gradients (bitwise mode), else ``None``.
        offloaded: the state is not on the device.
    """

    state: torch.Tensor
    grads: torch.Tensor
    params: torch.Tensor
    sums: torch.Tensor | None
    offloaded: bool = False

    @classmethod
    def allocate(
        cls,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool,
        offloaded: bool = False,
    ) -> Buffers:
        """New memory, all zero."""
        size = 3 * numel
        state = host_zeros(size, device) if offloaded else torch.zeros(size, device=device)
        apart = offloaded or dtype != torch.float32
        params = torch.zeros(numel, dtype=dtype, device=device) if apart else state[:numel]
        sums = torch.zeros(numel, dtype=torch.int64, device=device) if exact else None
        return cls(state, torch.zeros(numel, device=device), params, sums, offloaded)

    @staticmethod
    def nbytes(numel: int, dtype: torch.dtype, exact: bool, offloaded: bool = False) -> int:
        """Bytes of the device's memory that :meth:`allocate` takes."""
        apart = offloaded or dtype != torch.float32
        each = 4 + (dtype.itemsize if apart else 0) + (0 if offloaded else 12) + (8 if exact else 0)
        return numel * each


def host_zeros(numel: int, device: torch.device) -> torch.Tensor:
    """Float32 zeros in the host's memory, from which ``device`` copies fast.

    For CPU workers it is memory outside PyTorch's allocator, which stands for the device's.
    """
    if device.type == "cuda":
        return torch.zeros(numel, pin_memory=True)
    return torch.from_numpy(np.zeros(numel, dtype=np.float32))


class Slab:
    """One slab on one device.

    Attributes:
        params: ``[numel]`` in the model's type. ``parameters`` are views of it by name.
        grads: ``[numel]`` float32 sum of gradients; autograd accumulates into views of it.
        master: ``[numel]`` float32 weights; the very same memory as ``params`` in a float32 model.
        exp_avg, exp_avg_sq: ``[numel]`` float32 Adam moments.
        sums: ``[numel]`` int64, see :mod:`megatron_flex.runtime.exact`; ``None`` outside it.
        offloaded: master weights and moments are in host memory. A float32 model's parameters are
            then a copy of the master weights, which ``updated`` says is the newer one.
    """

    def __init__(self, index: int, layout: SlabLayout, buffers: Buffers) -> None:
        self.index = index
        self.layout = layout
        self.buffers = buffers
        numel = layout.numel
        self._state, self.params, self.grads = buffers.state, buffers.params, buffers.grads
        self.sums = buffers.sums
        self.master, self.exp_avg, self.exp_avg_sq = (
            self._state[i * numel : (i + 1) * numel] for i in range(3)
        )
        self.mixed = self.params.dtype != torch.float32
        self.offloaded = buffers.offloaded
        self.updated = False
        self.parameters = self._bind(self.grads)
        self._scratch: dict[int, torch.Tensor] = {}  # by unit

    @property
    def state(self) -> torch.Tensor:
        """``[3 * numel]`` float32: master weights and both moments, as they are now."""
        if self.updated:
            self.master.copy_(self.params.detach())
            self.updated = False
        return self._state

    @property
    def swapped(self) -> torch.Tensor:
        """The part of an offloaded state that an update needs on the device.

        A float32 model's weights are there anyway.
        """
        return self._state if self.mixed else self._state[self.layout.numel :]

    def scratch(self, unit: int) -> torch.Tensor:
        """Where autograd puts the gradients of one unit that uses this slab: ``grads``.

        With exact sums each user of a tied slab has its own: their contributions must not be added
        in floating point before they are rounded to integers.
        """
        if unit not in self._scratch:
            own = self.sums is not None and bool(self._scratch)
            self._scratch[unit] = torch.zeros_like(self.grads) if own else self.grads
        return self._scratch[unit]

    def parameters_of(self, unit: int) -> dict[str, torch.nn.Parameter]:
        """The parameters by name, to be bound to the block of ``unit``."""
        grads = self.scratch(unit)
        return self.parameters if grads is self.grads else self._bind(grads)

    def _bind(self, grads: torch.Tensor) -> dict[str, torch.nn.Parameter]:
        """Parameters by name, as views of the weights, whose gradients go to views of ``grads``.

        ``nn.Parameter(view)``, not ``.data``: writes through the slab stay visible to autograd's
        version counter.
        """
        bound = {}
        for entry in self.layout.entries:
            parameter = torch.nn.Parameter(self.view(self.params, entry))
            if self.mixed:
                parameter.grad_dtype = torch.float32
            parameter.grad = self.view(grads, entry)
            bound[entry.name] = parameter
        return bound

    @staticmethod
    def view(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
        """The part of a slab-sized ``buffer`` that belongs to ``entry``, in its shape."""
        return buffer[entry.offset : entry.offset + entry.numel].view(entry.shape)

    @torch.no_grad()
    def masters_from_params(self) -> None:
        """Start the master weights from the parameters (after loading weights alone)."""
        if self.mixed or self.offloaded:
            self.master.copy_(self.params)
            self.updated = False

    @torch.no_grad()
    def params_from_masters(self) -> None:
        """Round the master weights to the parameters' type (after an update, or an arrival)."""
        if self.mixed or self.offloaded:
            self.params.copy_(self.master)
            self.updated = False

    def squared_norm(self) -> torch.Tensor:
        """Squared norm of the gradient, a float64 scalar.

        Rows in float32, their squares summed in float64: the layout of a slab does not depend on
        the plan, so neither do the bits of this sum.
        """
        rows = torch.linalg.vector_norm(self.grads.view(-1, ROW), dim=1)
        return rows.double().square().sum()

    def zeros(self) -> torch.Tensor:
        """Number of parameters whose gradient is zero; padding does not count."""
        counts = [(self.view(self.grads, e) == 0).sum() for e in self.layout.entries]
        return torch.stack(counts).sum() if counts else torch.zeros((), device=self.grads.device)

    def named_state(self, *, model: bool = True, optimizer: bool = True) -> dict[str, torch.Tensor]:
        """Views of everything that a checkpoint holds, by name.

        Model tensors have Megatron's parameter names; optimizer tensors are
        ``optimizer.state.{exp_avg,exp_avg_sq,master}.<name>``, master only in mixed precision.
        """
        buffers = {"": self.params} if model else {}
        if optimizer:
            buffers["optimizer.state.exp_avg."] = self.exp_avg
            buffers["optimizer.state.exp_avg_sq."] = self.exp_avg_sq
            if self.mixed:
                buffers["optimizer.state.master."] = self.master
        return {
            prefix + entry.name: self.view(buffer, entry)
            for prefix, buffer in buffers.items()
            for entry in self.layout.entries
        }


class SlabPool:
    """Memory of dropped slabs, kept for the next of the same size.

    Never keeps more than brings the total back to the most that was in use at once, so a job
    that switches for a month holds what its largest layout needed.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, exact: bool) -> None:
        self._dtype, self._device, self._exact = dtype, device, exact
        self._free: dict[tuple[int, bool], list[Buffers]] = {}
        self.used = self.kept = self.most = 0  # bytes on the device

    def take(self, numel: int, *, offloaded: bool = False) -> Buffers:
        """Zeroed gradients and undefined state for a slab of ``numel`` elements."""
        size = self._size(numel, offloaded)
        self.used += size
        self.most = max(self.most, self.used)
        free = self._free.get((numel, offloaded))
        if free:
            self.kept -= size
            return free.pop()
        self.trim(self.most - self.used)
        return Buffers.allocate(numel, self._dtype, self._device, self._exact, offloaded)

    def give(self, buffers: Buffers) -> None:
        """Take back a slab's memory; its gradients must be zero."""
        key = buffers.grads.numel(), buffers.offloaded
        self.used -= self._size(*key)
        self.kept += self._size(*key)
        self._free.setdefault(key, []).append(buffers)
        self.trim(self.most - self.used)

    def trim(self, limit: int) -> None:
        """Free kept memory, largest first, until at most ``limit`` bytes are kept."""
        for key in sorted(self._free, reverse=True):
            free = self._free[key]
            while free and self.kept > limit:
                free.pop()
                self.kept -= self._size(*key)

    def _size(self, numel: int, offloaded: bool) -> int:
        return Buffers.nbytes(numel, self._dtype, self._exact, offloaded)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
