"""What a switch from one plan to the next costs, for each way of switching.

Ways of getting a slab's state to a device that will need it (docs/flexpipe.md):

* **drop**: the device holds more than it needs (grow). Nothing moves.
* **join early**: parameters and optimizer state travel during the running iteration, as far as the
  device has memory for them now; only what does not fit behind it is seen. The gradient crosses
  with the reduction that happens anyway.
* **hand over**: after the update, through the TwinLayer of the server: written and read in chunks
  that overlap, so the time is that of one copy over the slower link.

and, to compare with, for the whole plan: **stall** (after the update, without a TwinLayer: copied
whole, out of one device and then into the other), and **restart** (a checkpoint, then a new start).

Transfers of different devices run at the same time, so times are a maximum over the ends of every
link: receivers, senders, servers' networks, host links.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np

from megatron_flex.native import function
from megatron_flex.planner.build import ModelCosts
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.planner.tables import Array, Arrivals, BoolArray, IntArray
from megatron_flex.schedule.compact import rows
from megatron_flex.schedule.slabs import slab_holders
from megatron_flex.schedule.transition import Senders

SwitchMode = Literal["live", "handover", "stall", "restart"]

CHUNK_OVERHEAD = 1.05
"""A pipelined hand-over takes this times one copy: the first chunk is written before it is read."""
GROUP_SETUP = 0.02
"""Seconds to create process groups; hidden behind the running iteration in mode live."""
RESTART = 8.0
"""Seconds to start processes, libraries and communicators again."""
REMEMBERED_PLANS = 1024
"""Plans whose holders are remembered between prices."""
DISK_BYTES_PER_SECOND = 2e9
"""A checkpoint is written and read at this rate, by a server."""


class Way(str, Enum):
    """How one slab gets to one device."""

    JOIN_EARLY = "join early"
    HAND_OVER = "hand over"


@dataclass(frozen=True)
class Running:
    """The iteration that runs while the next one is prepared.

    Attributes:
        plan: its plan.
        seconds: its predicted (or measured) time.
        spare: bytes free on each device of the world while it runs.
    """

    plan: Plan
    seconds: float
    spare: tuple[float, ...]


@dataclass(frozen=True)
class Move:
    """State of ``slab``, ``size`` bytes, from device ``source`` to ``device``."""

    slab: int
    source: int
    device: int
    size: float
    way: Way


@dataclass(frozen=True)
class Switch:
    """A priced switch.

    Attributes:
        moves: everything that travels.
        drag: seconds by which early transfers lengthen the running iteration.
        stall: seconds between its update and the next iteration's first operation.
    """

    moves: tuple[Move, ...]
    drag: float
    stall: float

    @property
    def seconds(self) -> float:
        """All time that the switch costs."""
        return self.drag + self.stall

    @property
    def moved(self) -> float:
        """Bytes that travel."""
        return sum(m.size for m in self.moves)


def switch(costs: ModelCosts, running: Running, plan: Plan, mode: SwitchMode = "live") -> Switch:
    """Price the switch from the running plan to ``plan``."""
    if running.plan.stages == plan.stages:
        return Switch((), 0.0, 0.0)
    if mode == "restart":
        return Switch((), 0.0, restart_seconds(costs))
    moves = _moves(costs, running, plan, early=mode == "live")
    early = [m for m in moves if m.way is Way.JOIN_EARLY]
    late = [m for m in moves if m.way is Way.HAND_OVER]
    hidden = costs.options.travel * running.seconds
    drag = max(0.0, _network_seconds(costs, early) - hidden)
    if mode == "stall":
        stall = _stall_seconds(costs, late) + GROUP_SETUP
    else:
        stall = _handover_seconds(costs, late)
    return Switch(tuple(moves), drag, stall)


@dataclass(frozen=True)
class SwitchPrice:
    """What a live switch costs: seconds in all, and bytes that travel."""

    seconds: float
    moved: float


class LiveSwitches:
    """The price of ``switch(costs, running, plan)``, fast, for one job; remembers holders."""

    def __init__(self, costs: ModelCosts) -> None:
        self.costs = costs
        slabs = [costs.slab_state(s) for s in range(costs.layers.num_slabs)]
        self._parameters = np.array([float(s.parameters) for s in slabs])
        self._optimizer = np.array([float(s.optimizer) for s in slabs])
        self._gradients = np.array([joiner_bytes(costs, s) for s in range(costs.layers.num_slabs)])
        links = (costs.intra, costs.cluster.inter, costs.host)
        pairs = [(link.latency, 1.0 / link.bytes_per_second) for link in links]
        self._wires = np.array(pairs).ravel()
        self._holders: dict[tuple[Stage, ...], tuple[IntArray, IntArray]] = {}

    def _of(self, plan: Plan) -> tuple[IntArray, IntArray]:
        """Who holds each slab, as native code reads it."""
        if plan.stages not in self._holders:
            if len(self._holders) >= REMEMBERED_PLANS:
                self._holders.clear()
            self._holders[plan.stages] = rows(slab_holders(plan, self.costs.layers))
        return self._holders[plan.stages]

    def price(self, running: Running, plan: Plan) -> SwitchPrice:
        """The price of the switch from the running plan to ``plan``."""
        if running.plan.stages == plan.stages:
            return SwitchPrice(0.0, 0.0)
        old, new = self._of(running.plan), self._of(plan)
        cluster, options = self.costs.cluster, self.costs.options
        spare, out = np.array(running.spare), np.zeros(3)
        function("mflex_planner_switch")(
            len(self._parameters), *(array.ctypes.data for array in (*old, *new)),
            self._parameters.ctypes.data, self._optimizer.ctypes.data, self._gradients.ctypes.data,
            int(options.shard_optimizer), cluster.world_size, cluster.devices_per_server,
            self._wires.ctypes.data, spare.ctypes.data, out.ctypes.data,
        )  # fmt: skip
        drag = max(0.0, float(out[0]) - options.travel * running.seconds)
        return SwitchPrice(drag + CHUNK_OVERHEAD * float(out[1]), float(out[2]))


def restart_seconds(costs: ModelCosts) -> float:
    """Seconds of suspend and resume: write a checkpoint, start again, read it."""
    slabs = range(costs.layers.num_slabs)
    state = [costs.slab_state(s) for s in slabs]
    size = sum(s.parameters + s.optimizer for s in state)
    return RESTART + 2.0 * size / (DISK_BYTES_PER_SECOND * costs.cluster.servers)


def travelling(costs: ModelCosts, slab: int, degree: int) -> float:
    """Bytes that a new holder of a slab receives: parameters, optimizer state or its shard."""
    state = costs.slab_state(slab)
    optimizer = float(state.optimizer)
    return state.parameters + (optimizer / degree if costs.options.shard_optimizer else optimizer)


def joiner_bytes(costs: ModelCosts, slab: int) -> float:
    """Bytes of a slab that do not travel: its gradients, and their exact sums."""
    gradients = costs.slab_gradients[slab]
    return 3.0 * gradients if costs.options.bitwise else gradients


def _moves(costs: ModelCosts, running: Running, plan: Plan, early: bool) -> list[Move]:
    """What must travel."""
    before, after = slab_holders(running.plan, costs.layers), slab_holders(plan, costs.layers)
    spare = list(running.spare)
    senders = Senders(costs.cluster.devices_per_server)
    moves = []
    for slab, (old, new) in enumerate(zip(before, after, strict=True)):
        size = travelling(costs, slab, len(new))
        optimizer = float(costs.slab_state(slab).optimizer)
        for place, device in enumerate(new):
            need, room = size, size + joiner_bytes(costs, slab)  # its gradients come with it
            if device in old:
                if not costs.options.shard_optimizer:
                    continue
                lacks = _lacks(old.index(device), len(old), place, len(new))
                if lacks <= 1e-9:
                    continue
                need, room = optimizer * lacks, optimizer / len(new)
            sources = [d for d in old if d != device]
            if not sources or need <= 0:
                continue
            source = senders.of(device, sources, need)
            fits = early and spare[device] >= room
            if fits:
                spare[device] -= room
            moves.append(
                Move(slab, source, device, need, Way.JOIN_EARLY if fits else Way.HAND_OVER)
            )
    return moves


def _lacks(was: int, before: int, place: int, degree: int) -> float:
    """The part of a sharded slab that a device lacks of its new part.

    It was holder number ``was`` of ``before``, and will be number ``place`` of ``degree``.
    """
    both = min((was + 1.0) / before, (place + 1.0) / degree) - max(was / before, place / degree)
    return 1.0 / degree - max(0.0, both)


def _network_seconds(costs: ModelCosts, moves: list[Move]) -> float:
    """Seconds of direct transfers that all run at once."""
    ends: dict[tuple[str, int], float] = defaultdict(float)
    inter = costs.cluster.inter
    for move in moves:
        one, other = costs.cluster.server_of(move.source), costs.cluster.server_of(move.device)
        link = costs.intra if one == other else inter
        seconds = link.seconds(move.size)
        ends["out", move.source] += seconds
        ends["in", move.device] += seconds
        if one != other:
            # The devices of a server share its network.
            shared = move.size / (inter.bytes_per_second * costs.cluster.devices_per_server)
            ends["server out", one] += shared
            ends["server in", other] += shared
    return max(ends.values(), default=0.0)


def _across(costs: ModelCosts, moves: list[Move]) -> list[Move]:
    """Moves between servers."""
    server_of = costs.cluster.server_of
    return [m for m in moves if server_of(m.source) != server_of(m.device)]


def _handover_seconds(costs: ModelCosts, moves: list[Move]) -> float:
    """Seconds through TwinLayers: host links of both devices, and the network between servers."""
    host: dict[tuple[str, int], float] = defaultdict(float)
    written = set()
    for move in moves:
        if (move.slab, move.source) not in written:  # once, however many read it
            written.add((move.slab, move.source))
            host["out", move.source] += costs.host.seconds(move.size)
        host["in", move.device] += costs.host.seconds(move.size)
    worst = max(host.values(), default=0.0)
    return CHUNK_OVERHEAD * max(worst, _network_seconds(costs, _across(costs, moves)))


def _stall_seconds(costs: ModelCosts, moves: list[Move]) -> float:
    """Seconds without TwinLayers or overlap: out of every device, over the network, then in."""
    out: dict[int, float] = defaultdict(float)
    into: dict[int, float] = defaultdict(float)
    for move in moves:
        out[move.source] += costs.host.seconds(move.size)
        into[move.device] += costs.host.seconds(move.size)
    return (
        max(out.values(), default=0.0)
        + _network_seconds(costs, _across(costs, moves))
        + max(into.values(), default=0.0)
    )


def arrivals(costs: ModelCosts, running: Running) -> Arrivals:
    """The same costs as the searches see them: of every element for every class of devices.

    Local to a device: senders' load and servers' networks are left to :func:`switch`, which prices
    the candidates that the searches find.
    """
    cluster = costs.cluster
    held = costs.holdings(running.plan)  # [devices of the world, elements]
    degree = np.maximum(1, held.sum(axis=0))
    size_of: Array = costs.travelling
    if costs.options.shard_optimizer:
        size_of = size_of - costs.optimizer * (1.0 - 1.0 / degree)
    by_server = held.reshape(cluster.servers, cluster.devices_per_server, -1)
    on_server: BoolArray = np.logical_or.reduce(by_server, axis=1)
    classes: dict[tuple[bytes, int, float], int] = {}
    first: list[int] = []  # a device of each class
    device_class = []
    for device in range(costs.num_devices):
        key = (held[device].tobytes(), cluster.server_of(device), running.spare[device])
        if key not in classes:
            first.append(device)
        device_class.append(classes.setdefault(key, len(classes)))
    size = np.where(held[first], 0.0, size_of)
    inside = on_server[[cluster.server_of(d) for d in first]]
    per_link = np.where(
        inside, 1.0 / costs.intra.bytes_per_second, 1.0 / cluster.inter.bytes_per_second
    )
    slower = np.maximum(1.0 / costs.host.bytes_per_second, np.where(inside, 0.0, per_link))
    early = size * per_link
    return Arrivals(
        device_class=np.array(device_class, dtype=np.int64),
        size=size,
        early=early,
        handover=np.maximum(CHUNK_OVERHEAD * size * slower, early),
        spare=np.array([max(0.0, running.spare[d]) for d in first]),
        hide=costs.options.travel * running.seconds,
    )
