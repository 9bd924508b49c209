"""Which checkpoints are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.checkpoint.retention import KEEP_ALL, Retention

ITERATIONS = st.sets(st.integers(1, 500), min_size=1)
LIMIT = st.none() | st.integers(1, 50)


def test_the_newest_n_are_kept() -> None:
    assert Retention(keep=2).expired([10, 20, 30, 40], 40) == [10, 20]


def test_multiples_of_the_interval_are_kept_besides_the_newest() -> None:
    assert Retention(interval=100).expired([50, 100, 150, 200, 250], 250) == [50, 150]


def test_both_rules_together_keep_what_either_keeps() -> None:
    assert Retention(keep=2, interval=100).expired([50, 100, 150, 200, 250], 250) == [50, 150]
    assert Retention(keep=3, interval=100).expired([50, 100, 150, 200, 250], 250) == [50]


def test_without_rules_all_are_kept() -> None:
    assert KEEP_ALL.expired(range(1, 100), 99) == []


def test_iterations_after_the_saved_one_neither_count_nor_expire() -> None:
    assert Retention(keep=2).expired([10, 20, 25, 30, 40], 25) == [10]


@given(ITERATIONS, LIMIT, LIMIT, st.data())
def test_the_checkpoint_just_saved_never_expires(
    iterations: set[int], keep: int | None, interval: int | None, data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(sorted(iterations)))
    expired = Retention(keep, interval).expired(iterations, newest)
    assert newest not in expired
    past = [i for i in iterations if i <= newest]
    if keep is not None or interval is not None:
        assert len(set(past) - set(expired)) >= min(keep or 1, len(past))
    assert all(i < newest for i in expired)


@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_below_one_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Retention(keep=value)
    with pytest.raises(ValueError, match="interval must be at least 1"):
        Retention(interval=value)
