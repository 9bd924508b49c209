from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import get_blend_from_list

from megatron_flex.data.errors import DataError
from megatron_flex.data.paths import (
    Blend,
    parse_blend,
    split_bounds,
)

prefixes = st.text("abc/_", min_size=1, max_size=6)


@given(st.lists(st.tuples(st.floats(0.01, 99), prefixes), min_size=1, max_size=4))
def test_weights_and_prefixes_are_read_as_megatron_reads_them(
    pairs: list[tuple[float, str]],
) -> None:
    words = [word for weight, prefix in pairs for word in (str(weight), prefix)]
    blend = parse_blend(words)
    names, weights = get_blend_from_list(words)
    assert (list(blend.prefixes), list(blend.weights or ())) == (names, weights)


@given(st.lists(prefixes, min_size=1, max_size=5))
def test_prefixes_alone_have_no_weights(words: list[str]) -> None:
    assert parse_blend(words) == Blend(tuple(words), None)
    assert get_blend_from_list(words) == (words, None)


def test_a_set_of_weight_zero_is_left_out() -> None:
    assert parse_blend(["0", "a", "2", "b"]) == Blend(("b",), (2.0,))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "at least one"),
        (["0.5", "a", "b", "c"], "either each prefix has a weight"),
        (["0.5", "a", "0,5", "b"], "'0,5' is no weight"),
        (["-1", "a", "2", "b"], "--data-path: weight '-1' is not a finite number"),
        (["0.5", "a", "nan", "b"], "--data-path: weight 'nan' is not a finite number"),
        (["inf", "a", "1", "b"], "--data-path: weight 'inf' is not a finite number"),
        (["1e999", "a", "1", "b"], "--data-path: weight '1e999' is not a finite number"),
        (["1e308", "a", "1e308", "b"], "sum of the weights must be finite"),
        (["0", "a", "0", "b"], "above zero"),
    ],
)
def test_a_list_that_means_nothing_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_blend(words)


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any),
    st.integers(1, 10**6),
)
def test_splits_are_megatrons(shares: list[int], count: int) -> None:
    split = ",".join(map(str, shares))
    bounds = split_bounds(split, count)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for (start, stop), ends in zip(bounds, matrix, strict=True):
        if ends is None:
            assert start == stop
        else:
            assert (start, stop) == tuple(min(count, round(e * float(count))) for e in ends)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("split", ["0,0,0", "1,2,3,4", "1e308,1e308"])
def test_a_split_that_means_nothing_is_refused(split: str) -> None:
    with pytest.raises(DataError, match="--split takes up to three proportions"):
        split_bounds(split, 10)


@pytest.mark.parametrize(
    ("split", "field"),
    [
        ("90,abc5,5", "abc5"),
        ("9O,5,5", "9O"),
        ("nan,1,0", "nan"),
        ("1,inf", "inf"),
        ("1e999,1", "1e999"),
        ("969.30.1", "969.30.1"),
        ("969 30 1", "969 30 1"),
        ("1_0,1", "1_0"),
        ("-1,2,3", "-1"),
        ("90,,10", ""),
        ("", ""),
        ("1e,3", "1e"),
        ("some", "some"),
    ],
)
def test_a_field_of_a_split_is_read_whole(split: str, field: str) -> None:
    message = f"--split {split}: field '{field}' is not a finite number"
    with pytest.raises(DataError, match=re.escape(message)):
        split_bounds(split, 10)


@pytest.mark.parametrize("split", ["1e3,1", "1000,1", " 1000 , 1.0 ,0", "1.e3,1e0,.0"])
def test_the_same_numbers_are_the_same_split(split: str) -> None:
    # Megatron reads 1e3 as 1 and 3.
    assert split_bounds(split, 1001) == ((0, 1000), (1000, 1001), (1001, 1001))


def test_the_default_split_is_as_expected() -> None:
    assert split_bounds("969, 30, 1", 1000) == ((0, 969), (969, 999), (999, 1000))
    assert np.array(split_bounds("1", 7)).tolist() == [[0, 7], [7, 7], [7, 7]]
