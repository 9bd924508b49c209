"""What a plan costs: the time models, term by term. The readable definition.

``kernels/src/planner_cost.cpp`` is the fast twin; tests compare the two, and the exhaustive search
uses this one.

Time model ``pipeline`` (docs/planner.md)::

    T = max( max_g [ wait + work + tail + late + optimisation ], chain ) + max_g update

for every group g of devices that hold the same stages (one, or two in a V):

``wait``
    before its first operation: forward of the elements before it, each at the least of all
    micro-batches, and one hop (later hops overlap, and are left to the simulation). In a V also
    the wait for the second chunk: the forward of all before it, less what the first chunk fills:
    ``min(all its forwards on the busiest replica, K * mean forward)``. Where the backward is not
    split, nothing fills the round trip of one micro-batch through the elements after it: with the
    drain below, that makes the usual ``sum t + (n - 1) * max t`` of a straight pipeline.
``work``
    forward and backward on the busiest replica: all work times ``share[d]``. With it what messages
    keep it from computing.
``tail``
    the longer of the drain (backward of the elements before it; 0 with split backward) and of the
    gradient reduction that nothing hides: the largest slab's, or the whole less one backward.
``late``
    state for this plan that has not arrived when the iteration starts: what fits into the memory
    that the running iteration leaves is sent early and hidden behind it, the rest is handed over
    after its update. The slowest device of the group counts.
``optimisation``
    the least time for which recompute and offload save the bytes that are missing, taking parts of
    elements (a lower bound of the O_plan that :mod:`megatron_flex.planner.optimise` builds).
``chain``
    one micro-batch alone through the whole model and back; the slowest.
``update``
    of the optimizer, after the global norm has been agreed.

``K`` forwards are in flight on each replica of a stage (docs/planner.md): the part of the
work from the stage to the end, times all devices, over the stage's replicas, rounded up; one more
with split backward. Activation memory is that of the K largest micro-batches of any one replica.
1F1B lets more be in flight where neighbouring stages have different degrees, if that fits
(:mod:`pricing`); here a plan is lean.

Every term grows when a group takes more elements, and the sum does not grow when its start moves
on: the searches rely on it.

Time model ``paper``: eq. 1, see :func:`paper_time`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_flex.planner.tables import Tables
from megatron_flex.schedule.policies.policy import in_flight_cap


@dataclass(frozen=True)
class Group:
    """Devices that hold the same elements.

    Attributes:
        chunks: the runs of elements ``[begin, end)`` that each of them holds, in pipeline order:
            one in a straight pipeline, two in a V.
        devices: who holds them.
        replicas: for each chunk, all devices that hold it; empty when that is ``devices`` for all.
    """

    chunks: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...] = ()

    def of_chunk(self, number: int) -> tuple[int, ...]:
        """The devices that hold a chunk."""
        return self.replicas[number] if self.replicas else self.devices

    @property
    def elements(self) -> tuple[int, ...]:
        """All elements, ascending."""
        return tuple(e for begin, end in self.chunks for e in range(begin, end))


@dataclass(frozen=True)
class GroupCost:
    """Terms of one group, in seconds; ``bytes`` of the fullest device before optimisation."""

    wait: float
    work: float
    tail: float
    late: float
    optimisation: float
    update: float
    bytes: float
    missing: float

    @property
    def seconds(self) -> float:
        """Everything up to the global norm."""
        return self.wait + self.work + self.tail + self.late + self.optimisation


@dataclass(frozen=True)
class PlanCost:
    """A plan's predicted time: ``seconds`` of the iteration and the terms behind it."""

    seconds: float
    chain: float
    groups: tuple[GroupCost, ...]

    @property
    def fits(self) -> bool:
        """Whether every device fits, with memory optimisation where it is needed."""
        return math.isfinite(self.seconds)


def in_flight(t: Tables, element: int, degree: int) -> int:
    """K: forwards in flight on a replica of the stage that begins at ``element``."""
    return in_flight_cap(t.remaining[element], t.num_devices, degree) + (1 if t.split else 0)


def plan_cost(t: Tables, groups: Sequence[Group]) -> PlanCost:
    """The time model ``pipeline`` for groups that cover all elements."""
    costs = tuple(group_cost(t, group) for group in groups)
    worst = max(max(c.seconds for c in costs), t.chain)
    return PlanCost(worst + max(c.update for c in costs), t.chain, costs)


def inner_hop(t: Tables, group: Group) -> bool:
    """Whether activations reach the group within a server: the device before it is on it, too."""
    before = min(group.devices) - 1
    return before >= 0 and {int(t.server[d]) for d in group.devices} == {int(t.server[before])}


def group_cost(t: Tables, group: Group) -> GroupCost:
    """All terms of one group. ``optimisation`` is infinite when it cannot fit."""
    elements = list(group.elements)
    tied = 0 in elements and t.num_elements - 1 in elements and t.num_elements > 1
    link = 0 if inner_hop(t, group) else 1
    entry = elements[0]
    degrees = [len(group.of_chunk(c)) for c in range(len(group.chunks))]

    wait, fill, work = 0.0, 0.0, 0.0
    for (begin, end), degree in zip(group.chunks, degrees, strict=True):
        share = float(t.shares.share[degree])
        wait = max(wait, float(t.first_forward[:begin].sum()) - fill)
        forward = float(t.forward[begin:end].sum())
        fill += min(share * forward, in_flight(t, begin, degree) * forward / t.num_micro_batches)
        work += share * float(t.work[begin:end].sum())
    if not t.split:
        after = group.chunks[-1][1]
        wait += float(t.first_forward[after:].sum() + t.first_backward[after:].sum())
    if entry > 0:
        wait += t.wires.hop[link]
        work += float(t.shares.share[degrees[0]]) * t.wires.busy[link]

    update = -t.tied.update / (degrees[0] if t.sharded else 1) if tied else 0.0
    for (begin, end), degree in zip(group.chunks, degrees, strict=True):
        update += float(t.update[begin:end].sum()) / (degree if t.sharded else 1)

    needed = _bytes(t, group, degrees, tied)
    missing = max(0.0, needed - min(float(t.budget[d]) for d in group.devices))
    return GroupCost(
        wait=wait,
        work=work,
        tail=_tail(t, group, tied),
        late=_late(t, group),
        optimisation=_optimisation(t, group, degrees, missing) if missing > 0 else 0.0,
        update=update,
        bytes=needed,
        missing=missing,
    )


def _tail(t: Tables, group: Group, tied: bool) -> float:
    elements = list(group.elements)
    drain = 0.0 if t.split else float(t.first_backward[: elements[0]].sum())
    total, largest, latency = 0.0, 0.0, 0.0
    for number, (begin, end) in enumerate(group.chunks):
        devices = group.of_chunk(number)
        degree = len(devices) * t.width
        if degree == 1:
            continue
        link = 0 if len({int(t.server[d]) for d in devices}) == 1 else 1
        turns = 2.0 * (degree - 1)  # of a ring: reduce-scatter, then gather
        per_byte = turns / degree * t.wires.per_byte[link]
        latency = max(latency, turns * t.wires.latency[link])
        size = float(t.reduce[begin:end].sum()) - (t.tied.reduce if tied and number == 0 else 0.0)
        total += per_byte * size
        largest = max(largest, per_byte * float(t.largest_reduce[begin:end].max()))
    hidden = float(t.first_backward[elements].sum())
    return max(drain, largest + latency, total + latency - hidden)


def _late(t: Tables, group: Group) -> float:
    a = t.arrivals
    if a is None:
        return 0.0
    elements = list(group.elements)
    worst = 0.0
    for row in {int(a.device_class[d]) for d in group.devices}:
        size = float(a.size[row, elements].sum())
        if size <= 0:
            continue
        early = min(1.0, float(a.spare[row]) / size)
        sent = early * float(a.early[row, elements].sum())
        handed = (1.0 - early) * float(a.handover[row, elements].sum())
        worst = max(worst, max(0.0, sent - a.hide) + handed)
    return worst


def _bytes(t: Tables, group: Group, degrees: Sequence[int], tied: bool) -> float:
    """Bytes on each device of the group before memory optimisation."""
    activation = t.activation
    held = -t.tied.state - t.tied.optimizer / (degrees[0] if t.sharded else 1) if tied else 0.0
    for (begin, end), degree in zip(group.chunks, degrees, strict=True):
        optimizer = float(t.optimizer[begin:end].sum())
        held += float(t.state[begin:end].sum()) + optimizer / (degree if t.sharded else 1)
        tokens = t.shares.top_tokens(degree, in_flight(t, begin, degree))
        held += float(activation[begin:end].sum()) * tokens
    transient = float(t.transient[list(group.elements)].max()) * t.max_tokens
    return held + t.buffers + transient


def _optimisation(t: Tables, group: Group, degrees: Sequence[int], missing: float) -> float:
    """Least seconds in which recompute and offload save ``missing`` bytes, taking parts.

    Each element's activations may stay, be recomputed or go to the host (but for two micro-batches
    that are being worked on); its optimizer state may go to the host. A linear program over these:
    take the steps of every element's convex hull of (bytes, seconds) in order of price.
    """
    steps: list[tuple[float, float]] = []  # (bytes, seconds)
    for (begin, end), degree in zip(group.chunks, degrees, strict=True):
        for element in range(begin, end):
            steps.extend(saving_steps(t, begin, element, degree))
    seconds = 0.0
    for size, price in sorted((s for s in steps if s[0] > 0), key=lambda s: s[1] / s[0]):
        if size >= missing:
            return seconds + price * missing / size
        seconds += price
        missing -= size
    return math.inf


@dataclass(frozen=True)
class Savings:
    """What memory optimisation can do with one element on a replica: (bytes, seconds) pairs.

    ``None`` where it is not possible or not allowed.
    """

    optimizer: tuple[float, float] | None
    recompute: tuple[float, float] | None
    activations: tuple[float, float] | None


def savings(t: Tables, stage_begin: int, element: int, degree: int) -> Savings:
    """Savings of ``element`` in a stage that begins at ``stage_begin`` with ``degree`` replicas."""
    kind = t.kinds[int(t.kind[element])]
    share = float(t.shares.share[degree])
    cap = in_flight(t, stage_begin, degree)
    tokens = t.shares.top_tokens(degree, cap)
    optimizer = recompute = activations = None
    # What is split over replicas stays on the devices.
    if t.offload_optimizer and not (t.sharded and degree > 1):
        optimizer = (kind.optimizer, 2.0 * kind.optimizer * t.wires.host_per_byte)
    if kind.kept is not None:
        recompute = ((kind.activation - kind.kept) * tokens, kind.forward * share)
    if t.offload_activations:
        away = tokens - t.shares.top_tokens(degree, min(cap, 2))
        moved = kind.activation * t.total_tokens * share
        activations = (kind.activation * away, 2.0 * moved * t.wires.host_per_byte)
    return Savings(optimizer, recompute, activations)


def saving_steps(
    t: Tables, stage_begin: int, element: int, degree: int
) -> list[tuple[float, float]]:
    """Steps (bytes, seconds) of :func:`savings`, each worth taking only after those before it."""
    possible = savings(t, stage_begin, element, degree)
    either = [p for p in (possible.recompute, possible.activations) if p is not None]
    steps = _hull_steps([(0.0, 0.0), *either])
    if possible.optimizer is not None:
        steps.append(possible.optimizer)
    return steps


def _hull_steps(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Steps between the corners of the lower convex hull of (bytes, seconds), from (0, 0) on."""
    corners = [(0.0, 0.0)]
    while True:
        x, y = corners[-1]
        ahead = [(b - x, s - y, b, s) for b, s in points if b > x]
        if not ahead:
            break
        # The flattest way on; of equally flat ones the farthest.
        _, _, b, s = min(ahead, key=lambda p: (p[1] / p[0], -p[0]))
        corners.append((b, s))
    return [(b - x, s - y) for (x, y), (b, s) in pairwise(corners)]


def paper_time(stage_seconds: Sequence[float], micro_batches: int) -> float:
    """Eq. 1 of the paper: ``sum t_i + (n - S + 1) * max t_i``, the factor not below 0.

    Args:
        stage_seconds: for each of the S stages, forward, backward and communication of one
            micro-batch, divided by the stage's replicas.
        micro_batches: n.
    """
    factor = max(micro_batches - len(stage_seconds) + 1, 0)
    return sum(stage_seconds) + factor * max(stage_seconds)
