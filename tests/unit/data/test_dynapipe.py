"""DynaPipe's dynamic programming against all ways of cutting, where there are few."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data import dynapipe
from megatron_flex.data.dynapipe import StageTime, least_time
from megatron_flex.data.errors import DataError

SECONDS = StageTime(50.0, 1.0, 0.002)


@dataclass(frozen=True)
class Padded:
    """A run: samples, and the tokens that each is computed as."""

    count: int
    length: int

    @property
    def tokens(self) -> int:
        return self.count * self.length

    @property
    def squares(self) -> int:
        return self.count * self.length**2


def micro_batches(lengths: list[int], seconds: StageTime, **options: float) -> tuple[Padded, ...]:
    """The runs that take least time."""
    ascending = sorted(lengths)
    cuts = least_time(ascending, seconds, **options)  # type: ignore[arg-type]
    return tuple(Padded(b - a, ascending[b - 1]) for a, b in itertools.pairwise(cuts))


def _score(parts: tuple[Padded, ...], seconds: StageTime, stages: int, replicas: int) -> float:
    times = [seconds.fixed + seconds.token * p.tokens + seconds.pair * p.squares for p in parts]
    return (stages - 1) * max(times) + sum(times) / replicas


def _best(lengths: list[int], seconds: StageTime, stages: int, replicas: int, most: float) -> float:
    ascending, best = sorted(lengths), math.inf
    inner = range(1, len(ascending))
    for number in range(len(ascending)):
        for cuts in itertools.combinations(inner, number):
            edges = (0, *cuts, len(ascending))
            parts = tuple(Padded(b - a, ascending[b - 1]) for a, b in itertools.pairwise(edges))
            if all(p.tokens <= most for p in parts):
                best = min(best, _score(parts, seconds, stages, replicas))
    return best


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    st.integers(1, 8), st.integers(1, 4), st.floats(0.0, 500.0), st.floats(0.0, 0.01),
    st.one_of(st.just(math.inf), st.integers(3000, 9000).map(float)),
)  # fmt: skip
def test_it_is_the_best_of_all_cuts(
    lengths: list[int], stages: int, replicas: int, fixed: float, pair: float, most: float
) -> None:
    seconds = StageTime(fixed, 1.0, pair)
    found = micro_batches(lengths, seconds, stages=stages, replicas=replicas, most_tokens=most)
    assert sum(p.count for p in found) == len(lengths)
    assert all(p.tokens <= most for p in found)
    best = _best(lengths, seconds, stages, replicas, most)
    assert _score(found, seconds, stages, replicas) == pytest.approx(best, rel=1e-9)


def test_it_is_the_best_where_few_and_many_runs_are_about_as_good() -> None:
    draw = np.random.default_rng(11)
    for _ in range(150):
        lengths = draw.integers(100, 1000, 7).tolist()
        seconds = StageTime(float(draw.uniform(50, 800)), 1.0, 0.0)
        stages, replicas = int(draw.integers(2, 6)), int(draw.integers(1, 4))
        found = micro_batches(lengths, seconds, stages=stages, replicas=replicas)
        best = _best(lengths, seconds, stages, replicas, math.inf)
        assert _score(found, seconds, stages, replicas) == pytest.approx(best, rel=1e-9)


def test_runs_are_no_longer_than_memory_allows() -> None:
    seconds = StageTime(1e6, 1.0, 0.0)  # one run would be best
    found = micro_batches([100] * 8, seconds, stages=1, replicas=1, most_tokens=300)
    assert all(p.tokens <= 300 for p in found)
    assert len(found) == 3


def test_a_grid_of_bounds_loses_little(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(7)
    lengths = draw.lognormal(5.5, 0.9, 60).astype(int).clip(1).tolist()
    few = micro_batches(lengths, SECONDS, stages=8, replicas=2)
    monkeypatch.setattr(dynapipe, "BOUNDS", 10**6)
    every = micro_batches(lengths, SECONDS, stages=8, replicas=2)
    exact = _score(every, SECONDS, 8, 2)
    assert exact <= _score(few, SECONDS, 8, 2) <= 1.05 * exact


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(DataError, match="3000 tokens does not fit: at most 2999 do"):
        micro_batches([10, 3000], SECONDS, stages=2, replicas=1, most_tokens=2999)


def test_long_samples_are_alone_and_short_ones_together() -> None:
    parts = micro_batches([4000, 20, 25, 30, 22], SECONDS, stages=4, replicas=1)
    assert parts == (Padded(4, 30), Padded(1, 4000))


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30), st.integers(1, 6))
def test_runs_are_enough_for_all_replicas(lengths: list[int], parts: int) -> None:
    found = micro_batches(lengths, SECONDS, stages=1, replicas=parts, parts=parts)
    alone = [_score((Padded(1, n),), SECONDS, 2, 1) / 2 for n in lengths]
    most = max(max(alone), sum(alone) / parts)
    assert all(_score((p,), SECONDS, 2, 1) / 2 <= most * (1 + 1e-9) for p in found)
    assert sum(p.count for p in found) == len(lengths)
