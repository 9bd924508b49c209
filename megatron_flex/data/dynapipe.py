"""DynaPipe's micro-batches (Jiang et al., EuroSys 2024, arXiv:2311.10418).

Samples are sorted by length; a micro-batch is a run of neighbours, padded to its longest. Which
runs is chosen by dynamic programming so that the pipeline's time is least: with p stages and d
replicas, ``(p - 1) * max(t) + sum(t) / d`` over the micro-batches' times t on a stage. For a bound
on the largest t the least sum is found exactly; bounds are tried from the smallest on. Runs whose
padded tokens exceed ``most_tokens`` are left out: they would not fit the memory that a stage has
for one of the micro-batches in flight.

The estimate takes replicas for balanced, and a pipeline for full; and the order of entry is open.
So there are several ways of cutting a batch, of which a simulation of the plan says the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_flex.data.errors import DataError
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.data.padding import ORDERS, pad_runs

Floats = NDArray[np.float64]
BOUNDS = 96
"""Bounds on the largest micro-batch that are tried, where there are more: on a geometric grid,
about as fine as the 5 % that DynaPipe rounds times to."""
ROUNDS = (0, 1, 2, 4)
"""Runs that each replica gets at least, to choose among."""
DEFAULT_WAY = 1 + ORDERS.index("tent")
_WAYS = len(ROUNDS) * len(ORDERS)


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


@dataclass(frozen=True)
class Stage:
    """The slowest stage of a plan: what a micro-batch takes, and tokens that it has room for."""

    seconds: StageTime
    most_tokens: float

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Stage:
        """Read the form of ``dataclasses.asdict``."""
        return cls(StageTime(**data["seconds"]), data["most_tokens"])


@dataclass(frozen=True)
class DynaPipe:
    """DynaPipe's cut for one even plan.

    Attributes:
        stages, replicas: of the plan.
        kept: its slowest stage; ``again``: the same where everything is recomputed, for batches
            whose longest sample does not fit else.
    """

    stages: int
    replicas: int
    kept: Stage
    again: Stage

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DynaPipe:
        """Read the form of ``dataclasses.asdict``."""
        kept, again = Stage.from_json(data["kept"]), Stage.from_json(data["again"])
        return cls(data["stages"], data["replicas"], kept, again)

    def ways(self, batch: GlobalBatch) -> list[int]:
        """Numbers of the ways of cutting a batch that differ."""
        first = 1 if float(batch.lengths.max()) <= self.kept.most_tokens else 1 + _WAYS
        found: dict[tuple[MicroBatch, ...], int] = {}
        for way in range(first, first + _WAYS):
            found.setdefault(self.micro_batches(batch, way), way)
        return list(found.values())

    def micro_batches(self, batch: GlobalBatch, way: int) -> tuple[MicroBatch, ...]:
        """One way; a sample that is too long for a stage's memory is alone.

        Raises:
            DataError: there is no such way.
        """
        if not 1 <= way <= 2 * _WAYS:
            raise DataError(f"a plan's cut by DynaPipe is 1 to {2 * _WAYS}, not {way}")
        again, number = divmod(way - 1, _WAYS)
        rounds, order = divmod(number, len(ORDERS))
        stage = self.again if again else self.kept
        lengths = tuple(np.sort(batch.lengths).tolist())
        return pad_runs(batch, _runs(self, stage, ROUNDS[rounds], lengths), order)


@lru_cache(maxsize=256)
def _runs(plan: DynaPipe, stage: Stage, rounds: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    return least_time(
        lengths,
        stage.seconds,
        stages=plan.stages,
        replicas=plan.replicas,
        most_tokens=max(stage.most_tokens, lengths[-1]),
        parts=rounds * plan.replicas,
    )


def least_time(
    ascending: Sequence[int],
    seconds: StageTime,
    *,
    stages: int,
    replicas: int,
    most_tokens: float = np.inf,
    parts: float = 0.0,
) -> tuple[int, ...]:
    """Where to cut sorted samples to the runs that take least time: 0, ..., their number.

    Args:
        most_tokens: padded tokens of a run.
        parts: no run takes longer than all samples, each alone, divided by so many; but for samples
            that do alone. Where there are replicas, the time above takes them for balanced, which
            needs enough runs. 0: as long as may be.

    Raises:
        DataError: a sample alone has more than ``most_tokens``.
    """
    lengths = np.asarray(ascending, dtype=np.float64)
    count = len(lengths)
    if count == 0:
        raise DataError("a batch needs at least one sample")
    if lengths[-1] > most_tokens:
        raise DataError(
            f"a sample of {lengths[-1]:.0f} tokens does not fit: at most {most_tokens:.0f} do"
        )
    # times[i, j]: samples i to j as one micro-batch
    sizes = np.arange(count)[None, :] - np.arange(count)[:, None] + 1.0
    tokens = sizes * lengths[None, :]
    times = seconds.of(tokens, tokens * lengths[None, :])
    times = np.where((sizes < 1) | (tokens > most_tokens), np.inf, times)
    if parts:
        alone = np.diagonal(times)
        longest = max(float(alone.max()), float(alone.sum()) / parts)
        times = np.where(times > longest * (1 + 1e-12), np.inf, times)
    best, cuts = math.inf, [0, count]
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
    return tuple(cuts)


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
