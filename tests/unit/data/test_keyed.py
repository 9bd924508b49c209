from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.keyed import below, bits, derive, uniform

words = st.integers(min_value=0, max_value=2**64 - 1)


@given(words, st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_vectorised_draws_are_the_scalar_ones(key: int, counters: list[int]) -> None:
    keys = bits(derive(key), np.array(counters))
    assert [int(k) for k in keys] == [derive(key, c) for c in counters]


def test_keys_may_be_an_array_beside_the_counters() -> None:
    keys = np.array([derive(1), derive(2)], dtype=np.uint64)
    drawn = bits(keys, np.array([7, 7]))
    assert [int(d) for d in drawn] == [derive(1, 7), derive(2, 7)]


def test_the_generator_is_splitmix64() -> None:
    # The first outputs of the published reference code for the seed 1234567.
    drawn = bits(1234567, np.arange(3))
    assert drawn.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_the_order_of_words_matters() -> None:
    assert len({derive(1, 2), derive(2, 1), derive(1), derive(2), derive(1, 2, 0)}) == 5


def test_uniform_numbers_fill_the_unit_interval_evenly() -> None:
    draws = uniform(derive(3), np.arange(100_000))
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert np.abs(counts - 5000).max() < 5 * np.sqrt(5000)


@pytest.mark.parametrize("limit", [1, 2, 7, 10**9])
def test_bounded_integers_stay_below_the_limit(limit: int) -> None:
    draws = below(derive(4), np.arange(1000), limit)
    assert draws.min() >= 0
    assert draws.max() < limit
    if limit < 10:
        assert len(np.unique(draws)) == limit
