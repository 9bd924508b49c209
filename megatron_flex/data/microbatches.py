"""Packing whole samples to micro-batches.

The coefficients of the cost are fixed for a run (they come from flags or from the checkpoint), so
all processes cut alike, before and after a change of plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_flex.data.errors import DataError
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch, Slice

_TRIES = 4  # bin counts tried with all bins open from the start, before bins are added late


@dataclass(frozen=True)
class CostCoefficients:
    """Cost of a sample: ``linear * tokens + quadratic * tokens**2``, any unit."""

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        if self.linear < 0 or self.quadratic < 0 or self.linear + self.quadratic <= 0:
            raise DataError(f"cost coefficients must be positive: {self}")

    def of(self, tokens: float) -> float:
        """The cost of a sample, or of the first ``tokens`` tokens of one."""
        return self.linear * tokens + self.quadratic * tokens * tokens

    def tokens(self, cost: float) -> float:
        """Tokens of the sample of that cost."""
        root = math.sqrt(self.linear**2 + 4 * self.quadratic * cost)
        return 2 * cost / (self.linear + root) if cost else 0.0


def cut_by_count(batch: GlobalBatch, size: int) -> tuple[MicroBatch, ...]:
    """Micro-batches of ``size`` samples each, in sample order (``--micro-batch-size``).

    The last one has fewer when the batch is not a multiple.
    """
    if size < 1:
        raise DataError(f"--micro-batch-size must be at least 1, not {size}")
    lengths = batch.lengths.tolist()
    return tuple(
        _micro_batch(batch.first_sample, lengths, range(i, min(i + size, batch.size)))
        for i in range(0, batch.size, size)
    )


def cut_by_tokens(
    batch: GlobalBatch, budget: int, cost: CostCoefficients
) -> tuple[MicroBatch, ...]:
    """Micro-batches of at most ``budget`` tokens, balanced by cost (``--micro-batch-tokens``).

    A sample longer than the budget is a micro-batch alone. The others are placed longest first,
    each in the micro-batch of least cost so far that has room (LPT: Graham 1969, "Bounds on
    multiprocessing timing anomalies"). Starts from the fewest micro-batches that could hold all
    tokens and adds one when the samples do not fit. O(n log n): milliseconds for 4,096 samples.

    Returns:
        The micro-batches, cheap ones first and last (they fill and drain a pipeline best), the
        most expensive in the middle. Equal input gives equal output, everywhere.
    """
    if budget < 1:
        raise DataError(f"--micro-batch-tokens must be at least 1, not {budget}")
    lengths = batch.lengths
    order = np.lexsort((np.arange(batch.size), -lengths))  # longest first, then by number
    descending = lengths[order]
    alone = int(np.count_nonzero(descending > budget))
    rest = descending[alone:].tolist()
    bins: list[list[int]] = [[i] for i in range(alone)]
    if rest:
        fewest = -(-sum(rest) // budget)
        packed = None
        for count in range(fewest, fewest + _TRIES):
            packed = _place(rest, budget, cost, count, grow=count == fewest + _TRIES - 1)
            if packed is not None:
                break
        assert packed is not None  # the last try may grow
        bins += [[alone + i for i in members] for members in packed if members]
    costs = (
        cost.linear * descending + cost.quadratic * descending.astype(np.float64) ** 2
    ).tolist()
    ranked = sorted(bins, key=lambda members: (sum(costs[i] for i in members), members[0]))
    numbers, known = order.tolist(), batch.lengths.tolist()
    return tuple(
        _micro_batch(batch.first_sample, known, sorted(numbers[i] for i in members))
        for members in ranked[::2] + ranked[1::2][::-1]
    )


def _place(
    lengths: Sequence[int], budget: int, cost: CostCoefficients, count: int, *, grow: bool
) -> list[list[int]] | None:
    """LPT into ``count`` bins of ``budget`` tokens; ``None`` if they don't suffice.

    ``lengths`` descend. With ``grow`` bins are added as needed. A bin without room for the
    present sample is parked until samples are short enough; since lengths descend, each sample
    parks at most one bin, which keeps this O(n log n).
    """
    members: list[list[int]] = [[] for _ in range(count)]
    used = [0] * count
    open_bins = [(0.0, i) for i in range(count)]  # (cost, bin)
    parked: list[tuple[int, float, int]] = []  # (tokens used, cost, bin)
    for sample, length in enumerate(lengths):
        while parked and parked[0][0] + length <= budget:
            _, spent, chosen = heapq.heappop(parked)
            heapq.heappush(open_bins, (spent, chosen))
        while open_bins and used[open_bins[0][1]] + length > budget:
            spent, chosen = heapq.heappop(open_bins)
            heapq.heappush(parked, (used[chosen], spent, chosen))
        if open_bins:
            spent, chosen = heapq.heappop(open_bins)
        elif grow:
            spent, chosen = 0.0, len(members)
            members.append([])
            used.append(0)
        else:
            return None
        members[chosen].append(sample)
        used[chosen] += length
        spent += cost.of(length)
        heapq.heappush(open_bins, (spent, chosen))
    return members


def _micro_batch(first: int, lengths: Sequence[int], samples: Iterable[int]) -> MicroBatch:
    return MicroBatch(tuple(Slice.all_of(first + i, lengths[i]) for i in samples))
