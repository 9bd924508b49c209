from __future__ import annotations

import numpy as np
import pytest

from megatron_flex.data.errors import DataError
from megatron_flex.data.mock import LONGEST, MockDocuments, mixture_lengths


def test_lengths_have_the_published_distribution() -> None:
    lengths = mixture_lengths(1234, np.arange(400_000))
    assert lengths.min() >= 2
    assert lengths.max() <= LONGEST
    assert abs(lengths.mean() - 410) < 10
    p50, p90, p99, p999 = np.percentile(lengths, (50, 90, 99, 99.9))
    assert abs(p50 - 226) < 5
    assert abs(p90 - 966) < 20
    assert abs(p99 - 2065) < 80
    assert abs(p999 - 6300) < 700


def test_lengths_are_keyed_by_seed_and_document() -> None:
    some = mixture_lengths(1, np.array([5, 900, 5]))
    assert some[0] == some[2]
    assert np.array_equal(mixture_lengths(1, np.arange(1000))[[5, 900]], some[:2])
    assert not np.array_equal(mixture_lengths(2, np.arange(50)), mixture_lengths(1, np.arange(50)))


def test_any_part_of_a_document_can_be_read() -> None:
    documents = MockDocuments(300, 7, 20)
    whole = documents.read(3, 0, 50)
    assert np.array_equal(documents.read(3, 20, 30), whole[20:30])
    assert whole.min() >= 0
    assert whole.max() < 300
    assert not np.array_equal(whole, documents.read(4, 0, 50))


def test_frequencies_are_skewed_so_that_there_is_something_to_learn() -> None:
    tokens = MockDocuments(1000, 1, 1).read(0, 0, 100_000)
    assert abs((tokens < 125).mean() - 0.5) < 0.01


def test_sentences_join_to_the_document() -> None:
    documents = MockDocuments(300, 7, 20)
    lengths = documents.lengths(np.arange(20))
    assert [int(documents.sentences(i).sum()) for i in range(20)] == lengths.tolist()
    assert all(len(documents.sentences(i)) == 2 for i in range(20))


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(DataError):
        MockDocuments(0, 1)
