"""DynaPipe's micro-batches (Jiang et al., EuroSys 2024, arXiv:2311.10418).

Samples are sorted by length; a micro-batch is a run of neighbours, padded to its longest. Which
runs is chosen by dynamic programming so that the pipeline's time is least: with p stages and d
replicas, ``(p - 1) * max(t) + sum(t) / d`` over the micro-batches' times t on a stage. For a bound
on the largest t the least sum is found exactly; bounds are tried from the smallest on. Runs whose
padded tokens exceed ``most_tokens`` are left out: they would not fit the memory that a stage has
for one of the micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_flex.data.errors import DataError
from megatron_flex.simulator.padding import Padded

Floats = NDArray[np.float64]
BOUNDS = 96
"""Bounds on the largest micro-batch that are tried, where there are more: on a geometric grid,
about as fine as the 5 % that DynaPipe rounds times to."""


@dataclass(frozen=True)
class StageTime:
    """Seconds of a padded micro-batch on a stage: ``fixed + token * tokens + pair * squares``."""

    fixed: float
    token: float
    pair: float

    def of(self, tokens: Floats, squares: Floats) -> Floats:
        """For arrays of micro-batches."""
        found: Floats = self.fixed + self.token * tokens + self.pair * squares
        return found


def micro_batches(
    lengths: Sequence[int],
    seconds: StageTime,
    *,
    stages: int,
    replicas: int,
    most_tokens: float = np.inf,
    parts: float = 0.0,
) -> tuple[Padded, ...]:
    """The runs that take least time, from the shortest samples on.

    Args:
        most_tokens: padded tokens of a run.
        parts: no run takes longer than all samples, each alone, divided by so many; but for samples
            that do alone. Where there are replicas, the time above takes them for balanced, which
            needs enough runs. 0: as long as may be.

    Raises:
        DataError: a sample alone has more than ``most_tokens``.
    """
    ascending = np.sort(np.asarray(lengths, dtype=np.float64))
    count = len(ascending)
    if count == 0:
        raise DataError("a batch needs at least one sample")
    if ascending[-1] > most_tokens:
        raise DataError(
            f"a sample of {ascending[-1]:.0f} tokens does not fit: at most {most_tokens:.0f} do"
        )
    # times[i, j]: samples i to j as one micro-batch
    sizes = np.arange(count)[None, :] - np.arange(count)[:, None] + 1.0
    tokens = sizes * ascending[None, :]
    times = seconds.of(tokens, tokens * ascending[None, :])
    times = np.where((sizes < 1) | (tokens > most_tokens), np.inf, times)
    if parts:
        alone = np.diagonal(times)
        longest = max(float(alone.max()), float(alone.sum()) / parts)
        times = np.where(times > longest * (1 + 1e-12), np.inf, times)
    best, cuts = np.inf, [0, count]
    for bound in _bounds(times):
        if (stages - 1) * bound >= best:
            break
        found = _least_sum(times, bound)
        if found is None:
            continue
        total, own = found
        largest = max(float(times[a, b - 1]) for a, b in pairwise(own))
        score = (stages - 1) * largest + total / replicas
        if score < best:
            best, cuts = score, own
    return tuple(Padded(b - a, int(ascending[b - 1])) for a, b in pairwise(cuts))


def _bounds(times: Floats) -> Floats:
    """Bounds on the largest micro-batch, ascending: each sample must fit in some run."""
    least = float(np.diagonal(times).max())
    finite = np.unique(times[np.isfinite(times)])
    finite = finite[finite >= least * (1 - 1e-12)]
    if len(finite) <= BOUNDS:
        return finite
    grid = np.geomspace(finite[0], finite[-1], BOUNDS)
    return np.unique(finite[np.searchsorted(finite, grid * (1 + 1e-12), side="right") - 1])


def _least_sum(times: Floats, bound: float) -> tuple[float, list[int]] | None:
    """The cut to runs of at most ``bound`` with the least sum; ``None``: there is none."""
    count = len(times)
    allowed = np.where(times <= bound * (1 + 1e-12), times, np.inf)
    least = np.full(count + 1, np.inf)
    least[0] = 0.0
    before = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        totals = least[:end] + allowed[:end, end - 1]
        before[end] = int(totals.argmin())
        least[end] = totals[before[end]]
    if not np.isfinite(least[count]):
        return None
    cuts = [count]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    return float(least[count]), cuts[::-1]
