"""From a model, a profile, a cluster and micro-batches to :class:`Tables`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from megatron_flex.cluster.cluster import Cluster, Link
from megatron_flex.cluster.profile import Line, Profile
from megatron_flex.data.cut import Chains, chains_of
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind, LayerList
from megatron_flex.planner.memory import StateBytes, UnitMemory, tied_state, unit_memory
from megatron_flex.planner.native_search import shares
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.passes import slice_head
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.static import cut_points
from megatron_flex.planner.tables import (
    Array,
    Arrivals,
    BoolArray,
    ElementKind,
    IntArray,
    Shares,
    Tables,
    Tied,
    Wires,
)
from megatron_flex.planner.tensor import divides_messages, message_link

MESSAGE_BUFFERS = 4
"""Messages of the largest size that a device holds besides its activations: one received and one
sent, each way."""

FUSED_DEPTH = 3
"""Pipelines' worth of micro-batches in flight: one, and up to two more where neighbouring stages
have different degrees (the sum of both over all boundaries is below twice the devices)."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Micro-batches as numbers.

    Attributes:
        tokens, squares: ``[n]`` tokens and token pairs.
        sliced: ``[n]`` tokens of a slice of a longer sample; 0: there is none. Empty: none at all.
        chains: micro-batches that hold the slices of one sample, in order.
        target: what it was cut by, where a plan says so (:attr:`Plan.cut`).
    """

    tokens: Array
    squares: Array
    sliced: Array = field(default_factory=lambda: np.zeros(0))
    chains: Chains = ()
    target: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) == 0 or len(self.tokens) != len(self.squares):
            raise ValueError("a batch needs at least one micro-batch")
        if not len(self.sliced):
            object.__setattr__(self, "sliced", np.zeros(len(self.tokens)))

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch], target: int = 0) -> Batch:
        """The numbers of given micro-batches."""
        return cls(
            np.array([m.tokens for m in micro_batches], dtype=np.float64),
            np.array([m.squares for m in micro_batches], dtype=np.float64),
            np.array([m.sliced for m in micro_batches], dtype=np.float64),
            chains_of(micro_batches),
            target,
        )

    @property
    def key(self) -> tuple[bytes, bytes, bytes, Chains]:
        """Equal for equal micro-batches."""
        arrays = (self.tokens, self.squares, self.sliced)
        first, second, third = (a.tobytes() for a in arrays)
        return first, second, third, self.chains


@dataclass(frozen=True, eq=False)
class ModelCosts:
    """All that does not depend on the batch: coefficients and bytes of every element.

    Built once for a run. ``given_points``: other elements than ``options.unit`` means.
    """

    config: ModelConfig
    profile: Profile
    cluster: Cluster
    options: PlannerOptions
    given_points: tuple[int, ...] | None = None
    _shares: WeakKeyDictionary[Batch, dict[int, Shares]] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )
    _ranges: dict[tuple[int, int], tuple[float, float, float]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def num_devices(self) -> int:
        """Number of devices, all of the cluster's."""
        return self.cluster.world_size

    @cached_property
    def layers(self) -> LayerList:
        """The layer list."""
        return self.config.layers

    @cached_property
    def points(self) -> tuple[int, ...]:
        """First unit of each element, and the number of units."""
        if self.given_points is not None:
            return self.given_points
        return cut_points(self.layers, self.options.unit)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return len(self.points) - 1

    @cached_property
    def kinds(self) -> tuple[tuple[Kind, ...], ...]:
        """The kinds of the units in each element."""
        units = self.layers.units
        return tuple(
            tuple(unit.kind for unit in units[a:b])
            for a, b in zip(self.points, self.points[1:], strict=False)
        )

    def _sum(self, value: dict[Kind, float]) -> Array:
        return np.array([sum(value[k] for k in kinds) for kinds in self.kinds])

    def _lines(self, name: str) -> Array:
        rows = []
        for kinds in self.kinds:
            line = Line()
            for kind in kinds:
                line = line + getattr(self.profile.kinds[kind], name)
            rows.append((line.fixed, line.per_token, line.per_pair))
        return np.array(rows).T.copy()

    @cached_property
    def forward(self) -> Array:
        """``[3, elements]`` coefficients of the forward pass, seconds."""
        return self._lines("forward")

    @cached_property
    def backward_input(self) -> Array:
        """``[3, elements]`` of the input half of the backward pass."""
        return self._lines("backward_input")

    @cached_property
    def backward_weight(self) -> Array:
        """``[3, elements]`` of the weight half."""
        return self._lines("backward_weight")

    @cached_property
    def backward(self) -> Array:
        """``[3, elements]`` of the whole backward pass."""
        return self.backward_input + self.backward_weight

    @cached_property
    def memory(self) -> Mapping[Kind, UnitMemory]:
        """Memory of one unit of each kind."""
        return unit_memory(self.config, self.options.tensor)

    @property
    def ranks(self) -> int:
        """Devices that the devices stand for."""
        return self.num_devices * self.options.width

    @property
    def _shards(self) -> int:
        """Parts of optimizer state that every device has one of."""
        return self.options.width if self.options.shard_optimizer else 1

    def _part_of(self, state: StateBytes) -> StateBytes:
        return replace(state, optimizer=-(-state.optimizer // self._shards))

    @cached_property
    def unit_state(self) -> dict[Kind, StateBytes]:
        """State of one unit's own slab."""
        return {kind: self._part_of(m.state) for kind, m in self.memory.items()}

    @cached_property
    def tied_state(self) -> StateBytes:
        """State of the tied word embedding; zero when untied."""
        return self._part_of(tied_state(self.config, self.options.tensor))

    @cached_property
    def tied(self) -> Tied:
        """The tied word embedding."""
        state = self.tied_state
        return Tied(
            state=self._without_optimizer(state),
            optimizer=float(state.optimizer),
            update=self.profile.tied_update / self._shards,
            reduce=float(state.gradients),
        )

    def _with_tied(self, values: Array, extra: float) -> Array:
        ends = np.zeros(self.num_elements)
        ends[[0, -1]] = extra  # one element that is both counts the slab once
        return values + ends

    def _without_optimizer(self, state: StateBytes) -> float:
        """Bytes of parameters and gradients, with their exact sums where there are any."""
        sums = 2 * state.gradients if self.options.bitwise else 0
        return float(state.parameters + state.gradients + sums)

    @cached_property
    def own_state(self) -> Array:
        """Bytes of parameters and gradients, without the tied word embedding.

        With them what a pass needs whatever its tokens.
        """
        memory = self.memory
        return self._sum(
            {k: self._without_optimizer(s) + memory[k].fixed for k, s in self.unit_state.items()}
        )

    @cached_property
    def own_optimizer(self) -> Array:
        """Bytes of optimizer state, without the tied word embedding."""
        return self._sum({k: float(s.optimizer) for k, s in self.unit_state.items()})

    @cached_property
    def state(self) -> Array:
        """Bytes of parameters and gradients."""
        return self._with_tied(self.own_state, self.tied.state)

    @cached_property
    def optimizer(self) -> Array:
        """Bytes of optimizer state."""
        return self._with_tied(self.own_optimizer, self.tied.optimizer)

    @cached_property
    def reduce(self) -> Array:
        """Bytes of gradients."""
        own = {k: float(s.gradients) for k, s in self.unit_state.items()}
        return self._with_tied(self._sum(own), self.tied.reduce)

    @cached_property
    def largest_reduce(self) -> Array:
        """Bytes of the largest slab's gradient."""
        own = np.array([max(float(self.unit_state[k].gradients) for k in ks) for ks in self.kinds])
        own[0] = max(own[0], self.tied.reduce)
        own[-1] = max(own[-1], self.tied.reduce)
        return own

    @cached_property
    def update(self) -> Array:
        """Seconds of the optimizer."""
        own = {k: costs.update / self._shards for k, costs in self.profile.kinds.items()}
        return self._with_tied(self._sum(own), self.tied.update)

    @cached_property
    def transient(self) -> Array:
        """Bytes a token that a pass needs while it runs: the most of any unit in the element."""
        return np.array([max(self.profile.kinds[k].transient for k in ks) for ks in self.kinds])

    @cached_property
    def slice_head(self) -> float:
        """Bytes a token of the head of a slice while it runs; it keeps as much as its input."""
        levels = slice_head(self.config, self.options.tensor, alone=False).forward
        return self.profile.boundary + max(level.token for level in levels)

    def _transient(self, *, sliced: bool) -> Array:
        """:attr:`transient`, with all that a head holds while it runs where it keeps nothing."""
        if not sliced:
            return self.transient
        found = self.transient.copy()
        found[-1] = max(found[-1], self.slice_head)
        return found

    @cached_property
    def travelling(self) -> Array:
        """Bytes that move with an element: parameters and optimizer state (no gradients)."""
        own = {k: float(s.parameters + s.optimizer) for k, s in self.unit_state.items()}
        tied = self.tied_state
        return self._with_tied(self._sum(own), float(tied.parameters + tied.optimizer))

    @cached_property
    def element_kinds(self) -> tuple[tuple[tuple[Kind, ...], ...], IntArray]:
        """The distinct kinds of element, and the kind of each element."""
        distinct = tuple(dict.fromkeys(self.kinds))
        number = {kinds: i for i, kinds in enumerate(distinct)}
        return distinct, np.array([number[k] for k in self.kinds], dtype=np.int64)

    @cached_property
    def server(self) -> IntArray:
        """Server of each device."""
        return np.array(
            [self.cluster.server_of(d) for d in range(self.num_devices)], dtype=np.int64
        )

    @cached_property
    def activation(self) -> Array:
        """Bytes that a forward leaves, a token."""
        return self._sum({kind: costs.activation for kind, costs in self.profile.kinds.items()})

    @cached_property
    def owed(self) -> Array:
        """Bytes between the halves of a split backward, a token."""
        return self._sum({kind: unit.owed for kind, unit in self.memory.items()})

    @property
    def intra(self) -> Link:
        """The link between devices of a server: measured, if the profile has it."""
        return self.profile.links.get("intra", self.cluster.intra)

    @cached_property
    def between(self) -> Link:
        """What carries activations and their gradients between servers."""
        return message_link(self.cluster.inter, self.intra, self.options.tensor)

    @property
    def divided(self) -> int:
        """Devices of a server, where ranks send a share each of messages between servers; or 0."""
        divides = divides_messages(self.cluster.inter, self.intra, self.options.tensor)
        return self.cluster.devices_per_server if divides else 0

    @property
    def host(self) -> Link:
        """The link to the host's memory."""
        return self.profile.links.get("host", self.cluster.host)

    def slab_state(self, slab: int) -> StateBytes:
        """Bytes of a slab's state on one device."""
        if slab == self.layers.tied_slab:
            return self.tied_state
        return self.unit_state[self.layers.units[slab].kind]

    def in_range(self, start: int, stop: int) -> tuple[float, float, float]:
        """Of elements ``[start, stop)``: bytes of their own state without and of optimizer state,
        and the largest transient, bytes a token."""
        key = start, stop
        found = self._ranges.get(key)
        if found is None:
            own = slice(start, stop)
            state, optimizer = self.own_state[own].sum(), self.own_optimizer[own].sum()
            found = float(state), float(optimizer), float(self.transient[own].max())
            self._ranges[key] = found
        return found

    def placed(self, plan: Plan) -> Plan:
        """The plan, with optimizer state split over replicas where the options ask for it."""
        return plan.sharded() if self.options.shard_optimizer else plan

    @cached_property
    def slab_gradients(self) -> tuple[float, ...]:
        """Bytes of every slab's gradient."""
        slabs = range(self.layers.num_slabs)
        return tuple(float(self.slab_state(slab).gradients) for slab in slabs)

    @cached_property
    def slab_update(self) -> tuple[float, ...]:
        """Seconds of every slab's update on one device."""
        kinds = self.profile.kinds
        own = [kinds[unit.kind].update / self._shards for unit in self.layers.units]
        return (*own, self.tied.update) if self.layers.tied else tuple(own)

    @property
    def granule(self) -> int:
        """Group sizes are multiples of this: whole servers on a large cluster, else any."""
        per_server = self.cluster.devices_per_server
        large = self.num_devices > self.options.server_groups_above
        return per_server if large and self.num_devices % per_server == 0 else 1

    @property
    def budget(self) -> float:
        """Bytes of a device that training may use."""
        given = self.options.budget
        return float(self.cluster.usable_memory if given is None else given)

    @property
    def whole_budget(self) -> float:
        """The budget as the user gave it: :attr:`budget` may be smaller for a while."""
        given = self.options.whole_budget
        return self.budget if given is None else float(given)

    def _element_kind(
        self, kinds: tuple[Kind, ...], forward: float, *, sliced: bool
    ) -> ElementKind:
        options, memory = self.options, self.memory
        activation = sum(self.profile.kinds[k].activation for k in kinds)
        if sliced and Kind.HEAD in kinds:
            activation += self.profile.boundary - self.profile.kinds[Kind.HEAD].activation
        kept: float | None = None
        if options.memory_optimisation and options.recompute:
            parts = [memory[k].kept for k in kinds]
            if all(part is not None for part in parts):
                kept = float(min(activation, sum(part or 0.0 for part in parts)))
        optimizer = sum(self.unit_state[k].optimizer for k in kinds)
        return ElementKind(forward, activation, kept, float(optimizer))

    def tables(self, batch: Batch, arrivals: Arrivals | None = None, granule: int = 1) -> Tables:
        """The numbers of one micro-batching; ``granule``: group sizes are multiples of it."""
        basis = np.stack([np.ones_like(batch.tokens), batch.tokens, batch.squares])  # [3, n]
        distinct, kind = self.element_kinds
        which = [self.kinds.index(kinds) for kinds in distinct]
        forward = self.forward[:, which].T @ basis  # [kinds, n]
        backward = self.backward[:, which].T @ basis
        total = basis.sum(axis=1)
        forward_sum, backward_sum = self.forward.T @ total, self.backward.T @ total
        alone = (self.forward + self.backward).sum(axis=1) @ basis
        options = self.options
        host = options.memory_optimisation
        return Tables(
            points=self.points,
            work=forward_sum + backward_sum,
            forward=forward_sum,
            first_forward=forward.min(axis=1)[kind],
            first_backward=backward.min(axis=1)[kind],
            reduce=self.reduce,
            largest_reduce=self.largest_reduce,
            state=self.state,
            optimizer=self.optimizer,
            transient=self._transient(sliced=bool(batch.chains)),
            update=self.update,
            kind=kind,
            kinds=tuple(
                self._element_kind(k, float(forward_sum[e]), sliced=bool(batch.chains))
                for k, e in zip(distinct, which, strict=True)
            ),
            tied=self.tied,
            num_micro_batches=len(batch.tokens),
            max_tokens=float(batch.tokens.max()),
            total_tokens=float(batch.tokens.sum()),
            chain=float(alone.max()),
            shares=self._dealt(batch, alone, granule),
            server=self.server,
            budget=np.full(self.num_devices, self.budget),
            buffers=MESSAGE_BUFFERS * self.profile.boundary * float(batch.tokens.max()),
            wires=self.wires(batch),
            arrivals=arrivals,
            split=options.split,
            sharded=options.shard_optimizer,
            # What is split over replicas stays on the devices.
            offload_optimizer=host and options.offload_optimizer and self._shards == 1,
            offload_activations=host and options.offload_activations,
            width=options.width,
        )

    def _dealt(self, batch: Batch, alone: Array, granule: int) -> Shares:
        """How a batch falls to replicas: what takes longest in its tables, so only once."""
        known = self._shares.setdefault(batch, {})
        if granule not in known:
            depth = 1 if self.options.split else FUSED_DEPTH
            work, tokens = _dealt_whole(batch, alone)
            known[granule] = shares(work, tokens, self.num_devices, granule, depth)
        return known[granule]

    def wires(self, batch: Batch) -> Wires:
        """What the messages of a batch cost on this cluster."""
        boundary = self.profile.boundary
        inner, outer, host = self.intra, self.cluster.inter, self.host
        least, total, count = batch.tokens.min(), batch.tokens.sum(), len(batch.tokens)

        def busy(per_byte: float, latency: float) -> float:
            # An activation comes and a gradient goes, for every micro-batch.
            seconds = 2.0 * (boundary * float(total) * per_byte + count * latency)
            return self.options.message_busy * seconds

        pairs = [
            (1.0 / link.bytes_per_second, link.latency) for link in (inner, outer, self.between)
        ]
        messages = (pairs[0], pairs[2])
        return Wires(
            per_byte=(pairs[0][0], pairs[1][0]),
            latency=(pairs[0][1], pairs[1][1]),
            hop=tuple(boundary * float(least) * b + late for b, late in messages),  # type: ignore[arg-type]
            busy=tuple(busy(b, late) for b, late in messages),  # type: ignore[arg-type]
            host_per_byte=self.options.host_exposed / host.bytes_per_second,
        )

    def holdings(self, plan: Plan) -> BoolArray:
        """``[devices of the world, elements]``: who holds all units of which element."""
        units = np.zeros((self.cluster.world_size, self.layers.num_units), dtype=bool)
        for stage in plan.stages:
            units[list(stage.group), stage.start : stage.stop] = True
        return np.logical_and.reduceat(units, self.points[:-1], axis=1)


def _dealt_whole(batch: Batch, alone: Array) -> tuple[Array, Array]:
    """Seconds and tokens of what falls to one replica together: a chain is one."""
    if not batch.chains:
        return alone, batch.tokens
    lead = np.arange(len(alone))
    for chain in batch.chains:
        lead[list(chain)] = chain[0]
    first = np.flatnonzero(lead == np.arange(len(alone)))
    work, tokens = np.zeros(len(alone)), np.zeros(len(alone))
    np.add.at(work, lead, alone)
    np.add.at(tokens, lead, batch.tokens)
    return work[first], tokens[first]
