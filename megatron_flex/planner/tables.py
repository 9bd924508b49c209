"""All numbers that one decision needs, for one way of cutting the batch to micro-batches.

:class:`Tables` is what the searches, the oracle and the price of a plan share. An *element* is what
a stage boundary cannot cut: a unit, or with ``--flexpipe-unit layer`` a whole layer.
Devices of a server are next to each other. Times are seconds, sizes bytes; arrays are float64 over
elements unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class ElementKind:
    """What memory optimisation can do with one element of a kind.

    Attributes:
        forward: seconds of its forward pass over all micro-batches: what recomputing costs.
        activation: bytes that its forward leaves, a token.
        kept: the same when it is recomputed; ``None``: it cannot be.
        optimizer: bytes of optimizer state that can live on the host.
    """

    forward: float
    activation: float
    kept: float | None
    optimizer: float


@dataclass(frozen=True)
class Tied:
    """The slab that the first and the last element share; counted once where both are held."""

    state: float = 0.0
    optimizer: float = 0.0
    update: float = 0.0
    reduce: float = 0.0


@dataclass(frozen=True, eq=False)
class Shares:
    """How micro-batches fall to the replicas of a stage (``schedule/routing.py``'s partition).

    Attributes:
        share: ``[D + 1]``: work of the busiest of d replicas as a part of all work.
        offset: ``[D + 2]`` int64: row d of ``top`` is ``top[offset[d]:offset[d + 1]]``.
        top: row d, entry k: the most tokens in k micro-batches of one replica, for as many as can
            be in flight.
    """

    share: Array
    offset: IntArray
    top: Array

    def top_tokens(self, degree: int, number: int) -> float:
        """Most tokens in ``number`` micro-batches of one replica (all, if it has fewer)."""
        row = self.top[self.offset[degree] : self.offset[degree + 1]]
        return float(row[min(number, len(row) - 1)])


@dataclass(frozen=True)
class Wires:
    """What messages cost. ``inner`` is within a server, ``outer`` between servers.

    Attributes:
        per_byte, latency: of one message of a reduction; pairs (inner, outer).
        hop: seconds of the smallest micro-batch's activation to the next stage.
        busy: seconds that the messages of all micro-batches keep a stage from computing.
        host_per_byte: seconds that a byte to or from the host adds to the iteration.
    """

    per_byte: tuple[float, float]
    latency: tuple[float, float]
    hop: tuple[float, float] = (0.0, 0.0)
    busy: tuple[float, float] = (0.0, 0.0)
    host_per_byte: float = 0.0


@dataclass(frozen=True, eq=False)
class Arrivals:
    """What a switch from the current plan costs, for each class of devices that hold the same.

    Attributes:
        device_class: ``[D]`` int64 class of each device.
        size: ``[classes, elements]`` bytes that a device of the class lacks (0: it holds it).
        early: seconds to send them during the running iteration.
        handover: seconds to hand them over after its update; never below ``early``.
        spare: ``[classes]`` bytes that a device has free during the running iteration.
        hide: seconds of the running iteration in which state may travel unseen.
    """

    device_class: IntArray
    size: Array
    early: Array
    handover: Array
    spare: Array
    hide: float


@dataclass(frozen=True, eq=False)
class Tables:
    """One micro-batching on one order of devices.

    Attributes:
        points: ``[elements + 1]`` first unit of each element, and the number of units.
        work: forward and backward over all micro-batches.
        forward: forward over all micro-batches.
        first_forward: the least forward of any micro-batch.
        first_backward: the least backward of any micro-batch.
        reduce: bytes of gradients. ``largest_reduce``: of the largest slab among them.
        state: bytes of parameters and gradients.
        optimizer: bytes of optimizer state.
        transient: bytes a token while a pass runs.
        update: seconds of the optimizer on one device.
        kind: int64 index into ``kinds``.
        tied: what the first and the last element share.
        num_micro_batches: how many.
        max_tokens, total_tokens: of the micro-batches.
        chain: seconds of the slowest micro-batch alone, forward and backward.
        shares: how they fall to replicas.
        server: ``[D]`` int64 server of each device.
        budget: ``[D]`` bytes that each device may use.
        buffers: bytes on every device besides.
        wires: what messages cost.
        arrivals: what a switch costs; ``None`` without a current plan.
        split: backward in two halves, so that nothing drains and one more forward is in flight.
        sharded: optimizer state is split over the replicas.
        offload_optimizer, offload_activations: what may go to the host.
        width: devices that each one stands for; gradients are summed over all of them.
    """

    points: tuple[int, ...]
    work: Array
    forward: Array
    first_forward: Array
    first_backward: Array
    reduce: Array
    largest_reduce: Array
    state: Array
    optimizer: Array
    transient: Array
    update: Array
    kind: IntArray
    kinds: tuple[ElementKind, ...]
    tied: Tied
    num_micro_batches: int
    max_tokens: float
    total_tokens: float
    chain: float
    shares: Shares
    server: IntArray
    budget: Array
    buffers: float
    wires: Wires
    arrivals: Arrivals | None = None
    split: bool = False
    sharded: bool = False
    offload_optimizer: bool = False
    offload_activations: bool = False
    width: int = 1

    def __post_init__(self) -> None:
        seen: set[int] = set()
        servers = list(map(int, self.server))
        for before, server in zip((-1, *servers[:-1]), servers, strict=True):
            if server != before and server in seen:
                raise ValueError("devices of one server must be next to each other")
            seen.add(server)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return len(self.work)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.server)

    @cached_property
    def activation(self) -> Array:
        """Bytes that a forward leaves, a token."""
        return np.array([k.activation for k in self.kinds])[self.kind]

    @cached_property
    def remaining(self) -> Array:
        """``[elements + 1]`` work from an element to the end, as a part of all work."""
        total = float(self.work.sum())
        if total <= 0:
            return np.ones(self.num_elements + 1)
        return (total - prefix(self.work)) / total


def prefix(values: Sequence[float] | Array) -> Array:
    """``[n + 1]`` sums of the first 0 .. n values."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
