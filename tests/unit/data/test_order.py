from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.errors import DataError
from megatron_flex.data.order import EpochOrder, Permutation

seeds = st.integers(0, 2**32)


@given(st.integers(1, 3000), seeds)
def test_a_permutation_has_every_image_once(size: int, key: int) -> None:
    images = Permutation(size, key)(np.arange(size))
    assert np.array_equal(np.sort(images), np.arange(size))


@pytest.mark.parametrize(("size", "number"), [(2, 2), (3, 6), (4, 24)])
def test_all_permutations_of_few_are_equally_likely(size: int, number: int) -> None:
    draws = 200 * number
    images = np.array([Permutation(size, key * 7919)(np.arange(size)) for key in range(draws)])
    _, counts = np.unique(images, axis=0, return_counts=True)
    assert len(counts) == number
    assert ((counts - 200) ** 2 / 200).sum() < number + 6 * np.sqrt(2 * number)  # chi-squared


def test_a_permutation_leaves_no_trace_of_the_order() -> None:
    images = Permutation(100_000, 5)(np.arange(100_000))
    assert abs(np.corrcoef(images, np.arange(100_000))[0, 1]) < 0.02
    steps = np.diff(images)
    assert np.count_nonzero(steps == np.median(steps)) < 20


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any), seeds, st.integers(0, 5))
def test_each_epoch_has_each_sample_of_each_set_once(
    sizes: list[int], seed: int, epoch: int
) -> None:
    total = sum(sizes)
    order = EpochOrder(tuple(sizes), seed)
    which, index = order.locate(np.arange(epoch * total, (epoch + 1) * total))
    found = set(zip(which.tolist(), index.tolist(), strict=True))
    assert found == {(s, i) for s, size in enumerate(sizes) for i in range(size)}


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50), seeds)
def test_the_order_does_not_depend_on_how_it_is_asked(numbers: list[int], seed: int) -> None:
    order = EpochOrder((1000, 37), seed)
    together = order.locate(np.array(numbers))
    for position, number in enumerate(numbers):
        which, index = order.locate(np.array([number]))
        assert (which[0], index[0]) == (together[0][position], together[1][position])


def test_epochs_and_seeds_differ() -> None:
    first = EpochOrder((500,), 1).locate(np.arange(500))[1]
    again = EpochOrder((500,), 1).locate(np.arange(500))[1]
    second = EpochOrder((500,), 1).locate(np.arange(500, 1000))[1]
    other = EpochOrder((500,), 2).locate(np.arange(500))[1]
    assert np.array_equal(first, again)
    assert np.count_nonzero(first == second) < 20
    assert np.count_nonzero(first == other) < 20


def test_the_order_is_the_same_for_ever() -> None:
    # A change of these numbers changes the data of every resumed run.
    assert EpochOrder((1000,), 1234).locate(np.arange(998, 1003))[1].tolist() == [
        811,
        448,
        790,
        427,
        300,
    ]


def test_no_array_over_all_documents_is_made() -> None:
    order = EpochOrder((30_000_000,), 1)
    tracemalloc.start()
    order.locate(np.arange(4096))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4096 * 8 * 40


def test_only_an_order_that_repeats_is_endless() -> None:
    assert EpochOrder((3, 4), 1).num_samples is None
    assert EpochOrder((3, 4), 1, repeat=False).num_samples == 7


def test_nothing_to_draw_from_is_an_error() -> None:
    with pytest.raises(DataError, match="no sample"):
        EpochOrder((0, 0), 1)
