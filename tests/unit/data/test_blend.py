from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.blend import BlendOrder
from megatron_flex.data.errors import DataError

weight_lists = st.lists(st.floats(0.001, 100), min_size=1, max_size=12)


@given(weight_lists, st.integers(0, 10**6), st.integers(1, 300))
def test_each_set_is_within_a_sample_or_two_of_its_share(
    weights: list[float], seed: int, count: int
) -> None:
    order = BlendOrder((10,) * len(weights), tuple(weights), seed)
    which, _ = order.locate(np.arange(count))
    shares = np.array(weights) / sum(weights)
    drawn = np.bincount(which, minlength=len(weights))
    # Sainte-Lague stays within one of the share for two sets, and near it for more.
    assert np.abs(drawn - shares * count).max() < 1 + len(weights) / 2


@given(weight_lists, st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_the_mixture_does_not_depend_on_how_it_is_asked(
    weights: list[float], numbers: list[int]
) -> None:
    order = BlendOrder(tuple(range(5, 5 + len(weights))), tuple(weights), 3)
    which, index = order.locate(np.array(numbers))
    for position, number in enumerate(numbers):
        w, i = order.locate(np.array([number]))
        assert (w[0], i[0]) == (which[position], index[position])


@given(weight_lists, st.integers(0, 10**7))
def test_no_turn_is_skipped_or_taken_twice_across_blocks(weights: list[float], first: int) -> None:
    order = BlendOrder((1,) * len(weights), tuple(weights), 0)
    sets, turns = order._range(first, first + 500)
    again_sets, again_turns = order._range(first + 137, first + 500)
    assert np.array_equal(sets[137:], again_sets)
    assert np.array_equal(turns[137:], again_turns)
    for number in range(len(weights)):
        mine = turns[sets == number]
        assert np.array_equal(mine, np.arange(len(mine)) + (mine[0] if len(mine) else 0))


def test_turns_start_at_zero() -> None:
    order = BlendOrder((1, 1, 1), (0.7, 0.2, 0.1), 0)
    sets, turns = order._range(0, 20)
    for number in range(3):
        mine = turns[sets == number]
        assert mine.tolist() == list(range(len(mine)))


def test_each_set_goes_through_its_own_epochs() -> None:
    order = BlendOrder((6, 4), (0.5, 0.5), 9)
    which, index = order.locate(np.arange(48))
    for number, size in enumerate((6, 4)):
        mine = index[which == number]
        for start in range(0, 24 // size * size, size):
            assert sorted(mine[start : start + size].tolist()) == list(range(size))
    assert order.num_samples is None


def test_sets_are_drawn_by_the_rule_of_sainte_lague() -> None:
    # Due at 2/3, 2, 10/3, 14/3, ... and 2, 6, ...: of those due together the first set's first.
    which, _ = BlendOrder((9, 9), (3.0, 1.0), 4).locate(np.arange(8))
    assert which.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]


def test_impossible_weights_are_refused() -> None:
    with pytest.raises(DataError, match="positive"):
        BlendOrder((1, 1), (0.5, 0.0), 1)
    with pytest.raises(DataError, match="one weight for each"):
        BlendOrder((1, 1), (0.5,), 1)


def test_sets_of_a_blend_are_shuffled_differently() -> None:
    order = BlendOrder((50, 50, 50), (1.0, 1.0, 1.0), 9)
    which, index = order.locate(np.arange(150))
    orders = [index[which == number].tolist() for number in range(3)]
    assert all(sorted(o) == list(range(50)) for o in orders)
    # Two orders of 50 that are drawn apart share one place or so.
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.count_nonzero(np.equal(orders[one], orders[other])) < 10
