"""Micro-batches with padding, as trainers without variable-length attention make them.

All samples of a micro-batch are computed as equally many tokens. Their padding counts in no loss
and changes no gradient; its time and memory are what such a trainer pays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from megatron_flex.data.errors import DataError
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch, Slice

ORDERS = ("ascending", "tent", "descending")
"""In which micro-batches of sorted samples enter a pipeline: the shortest samples first, or first
and last, or last."""


def padded_micro_batch(batch: GlobalBatch, places: Iterable[int], length: int = 0) -> MicroBatch:
    """Samples at ``places`` of the batch, padded to the longest of them, or to ``length``."""
    chosen = sorted(places)
    lengths = batch.lengths[chosen].tolist()
    slices = (Slice.all_of(batch.first_sample + i, n) for i, n in zip(chosen, lengths, strict=True))
    return MicroBatch(tuple(slices), max(length, *lengths))


def pad_by_count(
    batch: GlobalBatch, size: int, length: int = 0, *, alike: bool = True
) -> tuple[MicroBatch, ...]:
    """``--micro-batch-size`` samples each, in their order; the last has what is left.

    Args:
        length: the least that all are padded to (``--seq-length``).
        alike: all are padded to the longest of the batch; else each to its own longest.
    """
    if size < 1:
        raise DataError(f"--micro-batch-size must be at least 1, not {size}")
    longest = max(length, int(batch.lengths.max())) if alike else length
    starts = range(0, batch.size, size)
    return tuple(
        padded_micro_batch(batch, range(i, min(i + size, batch.size)), longest) for i in starts
    )


def pad_by_bucket(batch: GlobalBatch, budget: int, order: int = 0) -> tuple[MicroBatch, ...]:
    """Samples of like length together: sorted, and cut where ``budget`` computed tokens are full.

    A sample longer than the budget is alone. ``order``: number of :data:`ORDERS`.
    """
    if budget < 1:
        raise DataError(f"--micro-batch-tokens must be at least 1, not {budget}")
    cuts, count = [0], 0
    for place, length in enumerate(np.sort(batch.lengths).tolist()):
        if count and (count + 1) * length > budget:
            cuts.append(place)
            count = 0
        count += 1
    return pad_runs(batch, (*cuts, batch.size), order)


def pad_runs(batch: GlobalBatch, cuts: Sequence[int], order: int) -> tuple[MicroBatch, ...]:
    """Samples sorted by length, a micro-batch from each of ``cuts`` to the next.

    Equal lengths are in the order of training.
    """
    places = np.argsort(batch.lengths, kind="stable").tolist()
    ascending = tuple(padded_micro_batch(batch, places[a:b]) for a, b in pairwise(cuts))
    match ORDERS[order]:
        case "ascending":
            return ascending
        case "tent":
            return ascending[0::2] + ascending[1::2][::-1]
        case _:
            return ascending[::-1]
