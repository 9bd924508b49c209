"""How global batches are cut to micro-batches: by the flags, or by what the plan says.

Everything is cut by one number where the planner chooses: every micro-batch should cost as much as
one sample of ``target`` tokens. Dearer samples become chains of slices (:mod:`slices`), the others
are packed, and fill up what slices leave free.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_flex.data.dynapipe import DEFAULT_WAY, DynaPipe
from megatron_flex.data.errors import DataError
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.data.microbatches import CostCoefficients, cut_by_count, cut_by_tokens
from megatron_flex.data.padding import ORDERS, pad_by_bucket, pad_by_count
from megatron_flex.data.slices import GRANULE, slices_of_cost, slices_of_tokens

DEFAULT_TARGET = 4096
"""Where neither flags nor a plan say how to cut: evaluations before the first plan, for example."""
PADS = ("micro-batch", "batch", "bucket", "dynapipe")
"""Samples of a micro-batch are padded to the longest of it, or of the whole batch, in their order;
samples of like length are together, up to a number of computed tokens, or as DynaPipe chooses."""
BY_WAY = ("bucket", "dynapipe")
"""Those that have several ways of cutting a batch, of which a plan says one."""
_TRIES = 4  # numbers of micro-batches tried with all open from the start, before more are opened

Chains = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Cut:
    """How a run's batches are cut.

    Attributes:
        tokens: most tokens of a micro-batch (``--micro-batch-tokens``); with ``by_cost`` the
            target.
        count: samples of a micro-batch (``--micro-batch-size``).
        slice_tokens: samples longer than this are cut to slices of so many tokens; 0: none.
        by_cost: micro-batches have equal costs, and a plan may name another target.
        sliced: samples that cost more than the target are cut.
        cost: what samples cost.
        pad: samples are padded, by one of :data:`PADS`; empty: they are not.
        pad_to: the least that they are padded to; with ``batch`` only.
        align: the tokens of a micro-batch are padded to a multiple of this. Not with ``dynapipe``,
            which fills memory to the token.
        dynapipe: the plan that ``dynapipe`` cuts for.
    """

    tokens: int | None = None
    count: int | None = None
    slice_tokens: int = 0
    by_cost: bool = False
    sliced: bool = False
    cost: CostCoefficients = field(default_factory=CostCoefficients)
    pad: str = ""
    pad_to: int = 0
    align: int = 1
    dynapipe: DynaPipe | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cut:
        """Read the form of ``dataclasses.asdict``."""
        given = dict(data)
        given["cost"] = CostCoefficients(**data["cost"])
        if data.get("dynapipe") is not None:
            given["dynapipe"] = DynaPipe.from_json(data["dynapipe"])
        return cls(**given)

    @property
    def open(self) -> bool:
        """Whether the plan says how to cut."""
        return (self.by_cost and self.tokens is None) or self.pad in BY_WAY

    def target(self, planned: int = 0) -> int:
        """What a batch is cut by under a plan that says ``planned``; 0: not by cost.

        Of :data:`BY_WAY` the number of one of :meth:`ways`.
        """
        if self.pad in BY_WAY:
            return planned or DEFAULT_WAY
        if not self.by_cost:
            return planned
        return self.tokens or planned or DEFAULT_TARGET

    def ways(self, batch: GlobalBatch) -> list[int]:
        """Of :data:`BY_WAY`: the numbers that a plan may say for a batch."""
        if self.pad == "dynapipe":
            assert self.dynapipe is not None
            return self.dynapipe.ways(batch)
        return list(range(1, 1 + len(ORDERS)))

    def micro_batches(self, batch: GlobalBatch, target: int = 0) -> tuple[MicroBatch, ...]:
        """The micro-batches of a batch, the same everywhere.

        Args:
            target: what the plan says, in tokens of a sample that costs as much; 0: nothing.
        """
        found = self._unaligned(batch, target)
        return found if self.align == 1 else tuple(m.aligned(self.align) for m in found)

    def _unaligned(self, batch: GlobalBatch, target: int) -> tuple[MicroBatch, ...]:
        if self.pad:
            return self._padded(batch, target)
        if self.by_cost or target:
            granule = math.lcm(GRANULE, self.align)
            return cut_by_cost(
                batch, self.target(target), self.cost, sliced=self.sliced, granule=granule
            )
        if self.slice_tokens:
            return self._in_slices(batch)
        return self._whole(batch)

    def _padded(self, batch: GlobalBatch, target: int) -> tuple[MicroBatch, ...]:
        if self.pad == "dynapipe":
            assert self.dynapipe is not None
            return self.dynapipe.micro_batches(batch, self.target(target))
        if self.pad == "bucket":
            if self.tokens is None:
                raise DataError("samples of like length need --micro-batch-tokens")
            order = (self.target(target) - 1) % len(ORDERS)
            return pad_by_bucket(batch, self.tokens, order)
        if self.count is None:
            raise DataError("padded samples need --micro-batch-size")
        alike = self.pad == "batch"
        return pad_by_count(batch, self.count, self.pad_to if alike else 0, alike=alike)

    def _whole(self, batch: GlobalBatch) -> tuple[MicroBatch, ...]:
        if self.tokens is not None:
            return cut_by_tokens(batch, self.tokens, self.cost)
        if self.count is None:
            raise DataError("a batch is cut by tokens, by count, or by what the plan says")
        return cut_by_count(batch, self.count)

    def _in_slices(self, batch: GlobalBatch) -> tuple[MicroBatch, ...]:
        """Slices are micro-batches alone; the other samples are packed as without them."""
        long = batch.lengths > self.slice_tokens
        found: list[MicroBatch] = []
        for i in _longest_first(batch, np.flatnonzero(long).tolist()):
            sample, length = batch.first_sample + i, int(batch.lengths[i])
            found += [
                MicroBatch((piece,))
                for piece in slices_of_tokens(sample, length, self.slice_tokens)
            ]
        rest = np.flatnonzero(~long)
        if len(rest):
            # Numbered within the rest first, so that packing sees a batch like any other.
            some = GlobalBatch(0, batch.lengths[rest], batch.denominators)
            numbers = (rest + batch.first_sample).tolist()
            found += [
                MicroBatch(tuple(Slice.all_of(numbers[s.sample], s.length) for s in part.slices))
                for part in self._whole(some)
            ]
        return tuple(found)


def cut_by_cost(
    batch: GlobalBatch,
    target: int,
    cost: CostCoefficients,
    *,
    sliced: bool,
    granule: int = GRANULE,
) -> tuple[MicroBatch, ...]:
    """Micro-batches that cost at most as much as a sample of ``target`` tokens.

    Chains come first, the longest before others, then the micro-batches of whole samples, cheap
    ones first and last. A dearer sample that may not be cut is alone. Whole samples are placed
    dearest first, each where the cost is least so far (LPT: Graham 1969), slices included: from
    the fewest micro-batches that could hold them on. Equal input gives equal output, everywhere.
    """
    if target < 1:
        raise DataError(f"the target of a cut must be at least 1 token, not {target}")
    limit = cost.of(target)
    lengths = batch.lengths.tolist()
    order = _longest_first(batch, range(batch.size))
    dear = [i for i in order if cost.of(lengths[i]) > limit * (1 + 1e-9)]
    rest = order[len(dear) :]
    bins: list[list[Slice]] = []
    alone: list[list[Slice]] = []
    for i in dear:
        sample = batch.first_sample + i
        pieces = slices_of_cost(sample, lengths[i], limit, cost, granule) if sliced else ()
        if len(pieces) > 1:
            bins += [[piece] for piece in pieces]
        else:
            alone.append([Slice.all_of(sample, lengths[i])])
    loads = [cost.of(b[0].stop) - cost.of(b[0].start) for b in bins]
    costs = [cost.of(lengths[i]) for i in rest]
    free = sum(max(0.0, limit - load) for load in loads)
    fewest = max(0, math.ceil((sum(costs) - free) / limit - 1e-9))
    placed: list[int] | None = None
    for more in range(_TRIES if rest else 0):
        placed = _place(costs, loads + [0.0] * (fewest + more), limit, grow=more == _TRIES - 1)
        if placed is not None:
            break
    packed: list[list[Slice]] = [[] for _ in range(max(placed or [-1]) + 1 - len(bins))]
    for i, place in zip(rest, placed or (), strict=True):
        home = bins[place] if place < len(bins) else packed[place - len(bins)]
        home.append(Slice.all_of(batch.first_sample + i, lengths[i]))
    whole = [sorted(p, key=lambda s: s.sample) for p in (*alone, *packed) if p]
    ranked = sorted(whole, key=lambda p: (sum(cost.of(s.length) for s in p), p[0].sample))
    chained = [[b[0], *sorted(b[1:], key=lambda s: s.sample)] for b in bins]
    return tuple(MicroBatch(tuple(p)) for p in chained + ranked[::2] + ranked[1::2][::-1])


def _longest_first(batch: GlobalBatch, numbers: Sequence[int]) -> list[int]:
    lengths = batch.lengths.tolist()
    return sorted(numbers, key=lambda i: (-lengths[i], i))


def _place(
    costs: Sequence[float], loads: list[float], limit: float, *, grow: bool
) -> list[int] | None:
    """For each cost, in descending order, the place of the least load; ``None`` if one has no room.

    With ``grow`` places are added as needed.
    """
    heap = [(load, i) for i, load in enumerate(loads)]
    heapq.heapify(heap)
    slack = limit * (1 + 1e-9)
    found = []
    for cost in costs:
        if heap and heap[0][0] + cost <= slack:
            load, place = heap[0]
            heapq.heapreplace(heap, (load + cost, place))
        elif grow:
            place = len(heap)
            heapq.heappush(heap, (cost, place))
        else:
            return None
        found.append(place)
    return found


def chains_of(micro_batches: Sequence[MicroBatch]) -> Chains:
    """The micro-batches that hold the slices of one sample, in order, for each such sample.

    Raises ``ValueError`` where slices are missing or out of order.
    """
    found: dict[int, list[int]] = {}
    reached: dict[int, int] = {}
    for number, micro_batch in enumerate(micro_batches):
        cut = [s for s in micro_batch.slices if not s.whole]
        if not cut:
            continue
        piece = cut[0]
        if len(cut) > 1 or micro_batch.slices[0] != piece:
            raise ValueError(f"micro-batch {number} has a slice that is not its first: {cut[-1]}")
        if piece.start != reached.get(piece.sample, 0):
            raise ValueError(f"micro-batch {number} has a slice out of order: {piece}")
        reached[piece.sample] = piece.stop
        found.setdefault(piece.sample, []).append(number)
    for sample, numbers in found.items():
        last = micro_batches[numbers[-1]].slices[0]
        if last.stop != last.length:
            raise ValueError(f"the last slices of sample {sample} are missing: {last}")
    return tuple(map(tuple, found.values()))
