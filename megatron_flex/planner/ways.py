"""Batches from the lengths of their samples, and the ways of cutting one that are worth a look."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_flex.data.cut import Cut
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.planner.build import Batch
from megatron_flex.planner.lazy import Lazy

SHARES = (1, 2, 4, 8, 16)
"""Micro-batches a device that the work of a batch may be divided into. With few large ones the
pipeline is filled and drained slowly, many small ones pay fixed costs: one or two are best on
mixtures of short samples, four and more where a few are long."""
_FULL = 8192
"""Tokens that keep any device busy. Micro-batches of more gain nothing and take memory, so a batch
that is huge for its devices is divided further, in quarters."""
_STEPS = 2  # targets to a doubling
_LEAST = 128  # tokens of the smallest target


def micro_batches(cut: Cut, lengths: Iterable[int], target: int = 0) -> tuple[MicroBatch, ...]:
    """The micro-batches of samples of these lengths, numbered from 0.

    Raises ``DataError`` where there are none.
    """
    array = np.asarray(list(lengths), dtype=np.int64)
    return cut.micro_batches(GlobalBatch(0, array, (int(array.sum()),)), target)


def batch_of(cut: Cut, lengths: Iterable[int], target: int = 0) -> Batch:
    """The same as numbers."""
    return Batch.of(micro_batches(cut, lengths, target), cut.target(target))


def ways(cut: Cut, lengths: Iterable[int], devices: int) -> Sequence[Batch]:
    """The ways of cutting a batch for so many devices: one, where the flags say how.

    Each is cut when it is looked at.
    """
    known = tuple(lengths)
    found = targets(cut, known, devices)
    return Lazy(len(found), lambda way: batch_of(cut, known, found[way]))


def targets(cut: Cut, lengths: tuple[int, ...], devices: int) -> list[int]:
    """Targets to choose from, on a geometric grid; 0 where the flags say how to cut.

    Numbers of ways where samples are padded.
    """
    if not cut.open:
        return [0]
    if cut.pad:
        array = np.array(lengths, dtype=np.int64)
        return cut.ways(GlobalBatch(0, array, (int(array.sum()),)))
    total = sum(map(cut.cost.of, lengths))
    found: dict[int, None] = {}
    shares = list(SHARES)
    while sum(lengths) > _FULL * devices * shares[-1] and shares[-1] < len(lengths):
        shares.append(4 * shares[-1])
    for share in shares:
        wanted = max(_LEAST, cut.cost.tokens(total / (devices * share)))
        step = round(_STEPS * math.log2(wanted / _LEAST))
        found[round(_LEAST * 2.0 ** (step / _STEPS))] = None
    return list(found)
