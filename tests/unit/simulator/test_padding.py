"""Padded micro-batches: totals by hand, and what holds of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.simulator.padding import Padded, batch_of_padded, by_bucket, by_count

LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=40)


def _tokens(parts: Sequence[Padded]) -> int:
    return sum(p.tokens for p in parts)


def test_by_count_pads_all_to_the_longest_of_the_batch() -> None:
    parts = by_count([100, 30, 70, 500, 20], 2)
    assert parts == (Padded(2, 500), Padded(2, 500), Padded(1, 500))
    assert _tokens(parts) == 2500  # 720 of them are samples'
    assert by_count([100, 30], 2, 2048) == (Padded(2, 2048),)


def test_by_bucket_pads_neighbours_to_the_longest_of_them() -> None:
    parts = by_bucket([100, 30, 70, 500, 20], 210)
    # 20, 30, 70 as three of 70 fill 210; 100 alone, for two of 500 are too many.
    assert parts == (Padded(3, 70), Padded(1, 100), Padded(1, 500))
    assert _tokens(parts) == 810


def test_a_batch_knows_computed_tokens_and_pairs() -> None:
    batch = batch_of_padded([Padded(3, 70), Padded(1, 500)])
    assert list(batch.tokens) == [210, 500]
    assert list(batch.squares) == [3 * 70 * 70, 500 * 500]
    assert not batch.chains


@given(LENGTHS, st.integers(1, 8), st.integers(0, 6000))
def test_by_count_computes_every_sample(lengths: list[int], size: int, least: int) -> None:
    parts = by_count(lengths, size, least)
    assert sum(p.count for p in parts) == len(lengths)
    assert all(p.length == max(least, *lengths, 1) and 1 <= p.count <= size for p in parts)


@given(LENGTHS, st.integers(1, 8000))
def test_by_bucket_keeps_to_the_budget(lengths: list[int], budget: int) -> None:
    parts = by_bucket(lengths, budget)
    assert sum(p.count for p in parts) == len(lengths)
    assert all(p.tokens <= budget or p.count == 1 for p in parts)
    rest = iter(sorted(lengths))
    for part in parts:
        assert max(next(rest) for _ in range(part.count)) == part.length
