"""Slabs: one contiguous buffer each for parameters, gradients and optimizer state.

Parameters are views into the buffer, so that a slab is copied, reduced, normed, updated and
checksummed in one operation, and moves to another device as one message (architecture decision:
a block is a slab).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch

from megatron_flex.schedule.shards import GRAIN, ROW, Range, round_up

# Every parameter starts at a multiple of this many elements: 64 bytes in bfloat16, 128 in float32.
# Unaligned one-row products differ in their last bits.
ALIGNMENT = GRAIN


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


class Sharing(Enum):
    """How the workers that share a layer have one of its parameters, in the order in a slab."""

    CUT = "each a part"
    WHOLE = "each all of it, and all of its gradient"
    PARTIAL = "each all of it, and a part of the sum that is its gradient"


@dataclass(frozen=True)
class SlabLayout:
    """Where each parameter lies: weight-decayed ones in ``[0, decayed)``, the others after.

    Attributes:
        counted: ranges whose squares and zeros this worker counts. Where workers share the layers,
            each counts what is cut, and the first what all of them have.
        partial: ranges whose gradient is the sum of theirs.
    """

    entries: tuple[Entry, ...]
    decayed: int
    numel: int
    counted: tuple[Range, ...]
    partial: tuple[Range, ...] = ()

    @classmethod
    def of(
        cls,
        shapes: Iterable[tuple[str, torch.Size]],
        decays: Callable[[str, torch.Size], bool],
        sharing: Callable[[str], Sharing] = lambda _: Sharing.CUT,
        index: int = 0,
    ) -> SlabLayout:
        """Lay out parameters, given as (name, shape).

        Args:
            shapes: of this worker's own tensors.
            decays: says which are weight-decayed.
            sharing: says how workers that share the layers have them; those of a kind lie together.
            index: this worker's number among them.
        """
        listed = list(shapes)
        entries: list[Entry] = []
        ranges: dict[Sharing, list[Range]] = {kind: [] for kind in Sharing}
        offset = decayed = 0
        for group in (True, False):
            for kind in Sharing:
                start = offset
                for name, shape in listed:
                    if decays(name, shape) is group and sharing(name) is kind:
                        entries.append(Entry(name, shape, offset))
                        offset = round_up(offset + shape.numel(), ALIGNMENT)
                if offset > start:
                    ranges[kind].append((start, offset))
            if group:
                decayed = offset
        numel = round_up(offset, ROW)
        counted = tuple(ranges[Sharing.CUT]) if index else ((0, numel),)
        return cls(tuple(entries), decayed, numel, counted, tuple(ranges[Sharing.PARTIAL]))

    def counted_of(self, part: Range | None) -> list[Range]:
        """What of ``part`` (of all) is counted here."""
        if part is None:
            return list(self.counted)
        ranges = [(max(start, part[0]), min(stop, part[1])) for start, stop in self.counted]
        return [(start, stop) for start, stop in ranges if start < stop]


@dataclass(frozen=True)
class Buffers:
    """The memory of one slab, reused by another of the same size.

    Attributes:
        state: ``[3 * numel]`` float32: master weights, then Adam's two moments. What travels. In
            host memory if ``offloaded``. If ``sharded`` of this device's part of the slab only, and
            without master weights in a float32 model: those are the parameters.
        grads: ``[numel]`` float32.
        params: ``[numel]`` in the model's type; for a float32 model a view of the master weights,
            unless these are offloaded.
        sums: ``[numel]`` int64 exact sums of gradients (bitwise mode), else ``None``.
        offloaded: the state is not on the device.
        sharded: the state is a part's; it is no part of the memory that is reused.
    """

    state: torch.Tensor
    grads: torch.Tensor
    params: torch.Tensor
    sums: torch.Tensor | None
    offloaded: bool = False
    sharded: bool = False

    @classmethod
    def allocate(
        cls,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool,
        offloaded: bool = False,
        sharded: bool = False,
    ) -> Buffers:
        """New memory, all zero; without a state if ``sharded``."""
        size = 0 if sharded else 3 * numel
        state = host_zeros(size, device) if offloaded else torch.zeros(size, device=device)
        apart = offloaded or sharded or dtype != torch.float32
        params = torch.zeros(numel, dtype=dtype, device=device) if apart else state[:numel]
        sums = torch.zeros(numel, dtype=torch.int64, device=device) if exact else None
        return cls(state, torch.zeros(numel, device=device), params, sums, offloaded, sharded)

    def of_part(self, part: Range) -> Buffers:
        """The same with a new state, all zero, for a part of the slab."""
        tensors = 2 if self.params.dtype == torch.float32 else 3
        size = tensors * (part[1] - part[0])
        return replace(self, state=torch.zeros(size, device=self.grads.device), sharded=True)

    @staticmethod
    def nbytes(numel: int, dtype: torch.dtype, exact: bool, stateless: bool = False) -> int:
        """Bytes of the device's memory that :meth:`allocate` takes.

        ``stateless``: offloaded or sharded.
        """
        apart = stateless or dtype != torch.float32
        each = 4 + (dtype.itemsize if apart else 0) + (0 if stateless else 12) + (8 if exact else 0)
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
        part: elements ``[start, stop)`` whose optimizer state this device has; all if not sharded.
        master: ``[part]`` float32 weights; the very same memory as ``params`` in a float32 model.
        exp_avg, exp_avg_sq: ``[part]`` float32 Adam moments.
        sums: ``[numel]`` int64, see :mod:`megatron_flex.runtime.exact`; ``None`` outside it.
        offloaded: master weights and moments are in host memory. A float32 model's parameters are
            then a copy of the master weights, which ``updated`` says is the newer one.
    """

    def __init__(
        self, index: int, layout: SlabLayout, buffers: Buffers, part: Range | None = None
    ) -> None:
        self.index = index
        self.layout = layout
        self.buffers = buffers
        self.part = part = (0, layout.numel) if part is None else part
        numel = part[1] - part[0]
        self._state, self.params, self.grads = buffers.state, buffers.params, buffers.grads
        self.sums = buffers.sums
        self.mixed = self.params.dtype != torch.float32
        self.offloaded = buffers.offloaded
        self.sharded = buffers.sharded
        self.master = self._own(self.params)
        if self.mixed or not self.sharded:
            self.master = self._state[:numel]
        at = self._state.numel() - 2 * numel
        self.exp_avg, self.exp_avg_sq = self._state[at : at + numel], self._state[at + numel :]
        self.updated = False
        self.parameters = self._bind(self.grads)
        self._scratch: dict[int, torch.Tensor] = {}  # by unit

    @property
    def state(self) -> torch.Tensor:
        """``[3 * numel]`` float32: master weights and both moments, as they are now.

        Of a sharded slab see :meth:`piece` and :meth:`spread`.
        """
        if self.sharded:
            raise ValueError(f"slab {self.index} is sharded: no device has its whole state")
        self._refresh()
        return self._state

    def _refresh(self) -> None:
        """Let an offloaded state have the newest weights."""
        if self.updated:
            self.master.copy_(self.params.detach())
            self.updated = False

    @property
    def swapped(self) -> torch.Tensor:
        """The part of an offloaded state that an update needs on the device.

        A float32 model's weights are there anyway.
        """
        return self._state if self.mixed else self._state[self.layout.numel :]

    def piece(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Views of master weights and both moments of elements of this device's part."""
        self._refresh()
        a, b = start - self.part[0], stop - self.part[0]
        return self.master[a:b], self.exp_avg[a:b], self.exp_avg_sq[a:b]

    @torch.no_grad()
    def spread(self) -> Slab:
        """This slab, unsharded, with a state in the host's memory where this part is filled in.

        Parameters and gradients are the same memory.
        """
        state = host_zeros(3 * self.layout.numel, self.grads.device)
        buffers = replace(self.buffers, state=state, offloaded=True, sharded=False)
        whole = Slab(self.index, self.layout, buffers)
        for target, source in zip(whole.piece(*self.part), self.piece(*self.part), strict=True):
            target.copy_(source)
        return whole

    @torch.no_grad()
    def take_part(self, whole: Slab) -> None:
        """Copy this part of the optimizer state from one that has it.

        Not the weights of a float32 model: they are parameters.
        """
        pieces = zip(self.piece(*self.part), whole.piece(*self.part), strict=True)
        for target, source in list(pieces)[0 if self.mixed else 1 :]:
            target.copy_(source)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a slab-sized tensor whose optimizer state is here."""
        return tensor[self.part[0] : self.part[1]]

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
            self.master.copy_(self._own(self.params))
            self.updated = False

    @torch.no_grad()
    def params_from_masters(self) -> None:
        """Round the master weights to the parameters' type (after an update, or an arrival).

        Of a sharded slab only this device's part.
        """
        if self.mixed or self.offloaded:
            self._own(self.params).copy_(self.master)
            self.updated = False

    def squared_norm(self, part: Range | None = None) -> torch.Tensor:
        """Squared norm of the gradient (of a part) as far as it is counted here, a float64 scalar.

        Rows in float32, their squares summed in float64: the layout of a slab does not depend on
        the plan, so neither do the bits of this sum.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.grads.device)
        for start, stop in self.layout.counted_of(part):
            row = math.gcd(stop - start, ROW) or ROW
            rows = torch.linalg.vector_norm(self.grads[start:stop].view(-1, row), dim=1)
            total += rows.double().square().sum()
        return total

    def zeros(self, part: Range | None = None) -> torch.Tensor:
        """Number of parameters (of a part) whose gradient is zero, as far as they are counted here.

        Padding does not count.
        """
        counts = [torch.zeros((), dtype=torch.int64, device=self.grads.device)]
        for start, stop in self.layout.counted_of(part):
            for entry in self.layout.entries:
                first, last = max(start, entry.offset), min(stop, entry.offset + entry.numel)
                if first < last:
                    counts.append((self.grads[first:last] == 0).sum())
        return torch.stack(counts).sum()

    def squared_weights(self) -> float:
        """Squared norm of the parameters as far as they are counted here."""
        parts = (self.params[start:stop] for start, stop in self.layout.counted)
        return sum(part.detach().double().square().sum().item() for part in parts)

    def named_state(self, *, model: bool = True, optimizer: bool = True) -> dict[str, torch.Tensor]:
        """Views of everything that a checkpoint holds, by name.

        Model tensors have Megatron's parameter names; optimizer tensors are
        ``optimizer.state.{exp_avg,exp_avg_sq,master}.<name>``, master only in mixed precision.
        The optimizer state of a sharded slab is that of its :meth:`spread`.
        """
        if self.sharded and optimizer:
            raise ValueError(f"slab {self.index} is sharded: no device has its whole state")
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
        self._free: dict[tuple[int, bool, bool], list[Buffers]] = {}
        self.used = self.kept = self.most = 0  # bytes on the device

    def take(self, numel: int, *, offloaded: bool = False, sharded: bool = False) -> Buffers:
        """Zeroed gradients and undefined state for a slab of ``numel`` elements.

        Without a state if ``sharded``.
        """
        size = self._size(numel, offloaded or sharded)
        self.used += size
        self.most = max(self.most, self.used)
        free = self._free.get((numel, offloaded, sharded))
        if free:
            self.kept -= size
            return free.pop()
        self.trim(self.most - self.used)
        return Buffers.allocate(numel, self._dtype, self._device, self._exact, offloaded, sharded)

    def give(self, buffers: Buffers) -> None:
        """Take back a slab's memory; its gradients must be zero. A part's state is freed."""
        if buffers.sharded:
            buffers = replace(buffers, state=buffers.state.new_zeros(0))
        numel = buffers.grads.numel()
        size = self._size(numel, buffers.offloaded or buffers.sharded)
        self.used -= size
        self.kept += size
        self._free.setdefault((numel, buffers.offloaded, buffers.sharded), []).append(buffers)
        self.trim(self.most - self.used)

    def trim(self, limit: int) -> None:
        """Free kept memory, largest first, until at most ``limit`` bytes are kept."""
        for key in sorted(self._free, reverse=True):
            free = self._free[key]
            while free and self.kept > limit:
                free.pop()
                self.kept -= self._size(key[0], key[1] or key[2])

    def _size(self, numel: int, stateless: bool) -> int:
        return Buffers.nbytes(numel, self._dtype, self._exact, stateless)
