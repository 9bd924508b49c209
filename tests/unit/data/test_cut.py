"""Batches cut to equal costs: packed short samples, and chains of slices of the long ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.cut import Cut, chains_of, cut_by_cost
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.data.slices import GRANULE, slices_of_cost, slices_of_tokens

lengths_lists = st.lists(
    st.integers(1, 300) | st.integers(300, 6000), min_size=1, max_size=40
)  # fmt: skip
coefficients = st.builds(CostCoefficients, st.floats(0.1, 10), st.floats(0, 0.01))
cuts = st.builds(
    Cut,
    tokens=st.integers(100, 3000),
    slice_tokens=st.integers(0, 2000),
    by_cost=st.booleans(),
    sliced=st.booleans(),
    cost=coefficients,
)


def batch(lengths: list[int], first: int = 1000) -> GlobalBatch:
    return GlobalBatch(first, np.asarray(lengths, dtype=np.int64), (sum(lengths),))


def cost_of(piece: Slice, c: CostCoefficients) -> float:
    return c.of(piece.stop) - c.of(piece.start)


@given(lengths_lists, cuts)
def test_every_token_is_in_one_place_and_chains_are_in_order(lengths: list[int], cut: Cut) -> None:
    parts = cut.micro_batches(batch(lengths))
    reached: dict[int, int] = {}
    for piece in (s for m in parts for s in m.slices):  # by number: a chain's slices ascend
        assert piece.start == reached.get(piece.sample, 0)
        assert piece.length == lengths[piece.sample - 1000]
        reached[piece.sample] = piece.stop
    assert reached == {1000 + i: n for i, n in enumerate(lengths)}
    sliced = {s.sample for m in parts for s in m.slices if not s.whole}
    assert len(chains_of(parts)) == len(sliced)
    assert parts == cut.micro_batches(batch(lengths))


@given(lengths_lists, coefficients, st.integers(64, 4000))
def test_no_micro_batch_costs_more_than_the_target_but_by_a_granule(
    lengths: list[int], c: CostCoefficients, target: int
) -> None:
    parts = cut_by_cost(batch(lengths), target, c, sliced=True)
    limit = c.of(target)
    for m in parts:
        longest = max(s.length for s in m.slices)
        granule = c.of(longest) - c.of(max(0, longest - GRANULE))
        assert sum(cost_of(s, c) for s in m.slices) <= limit * (1 + 1e-6) + granule


@given(lengths_lists, coefficients, st.integers(64, 4000), st.booleans())
def test_there_are_few_micro_batches(
    lengths: list[int], c: CostCoefficients, target: int, sliced: bool
) -> None:
    parts = cut_by_cost(batch(lengths), target, c, sliced=sliced)
    limit = c.of(target)
    fewest = sum(-(-c.of(n) // limit) if sliced else 1 for n in lengths if c.of(n) > limit)
    rest = sum(c.of(n) for n in lengths if c.of(n) <= limit)
    assert len(parts) <= fewest + max(2 * -(-rest // limit), -(-rest // limit) + 3)


def test_whole_samples_fill_what_slices_leave_free() -> None:
    parts = cut_by_cost(batch([1100, 400, 400, 50]), 1000, CostCoefficients(), sliced=True)
    assert [[s.tokens for s in m.slices] for m in parts] == [[576, 400], [524, 400, 50]]


@given(st.integers(1, 70_000), coefficients, st.floats(50, 1e5))
def test_slices_have_equal_costs_and_begin_at_granules(
    length: int, c: CostCoefficients, limit: float
) -> None:
    pieces = slices_of_cost(3, length, limit, c)
    assert [p.start for p in pieces[1:]] == [p.stop for p in pieces[:-1]]
    assert pieces[0].start == 0
    assert pieces[-1].stop == length
    assert all(p.start % GRANULE == 0 and p.tokens > 0 for p in pieces)
    mean = c.of(length) / max(1, np.ceil(c.of(length) / limit - 1e-9))
    granule = c.of(length) - c.of(max(0, length - GRANULE))
    if mean > granule:
        assert all(abs(cost_of(p, c) - mean) <= granule * (1 + 1e-6) for p in pieces)


def test_the_first_slice_of_a_long_sample_is_the_longest() -> None:
    pieces = slices_of_cost(0, 65_536, CostCoefficients(1.0, 1e-4).of(65_536) / 16,
                            CostCoefficients(1.0, 1e-4))  # fmt: skip
    assert len(pieces) == 16
    assert pieces[0].tokens > 3 * pieces[-1].tokens


@pytest.mark.parametrize(("length", "tokens"), [(10, 1), (10, 3), (10, 9), (10, 10), (10, 64)])
def test_slices_of_so_many_tokens_and_what_is_left(length: int, tokens: int) -> None:
    sizes = [p.tokens for p in slices_of_tokens(0, length, tokens)]
    assert sum(sizes) == length
    assert all(size == tokens for size in sizes[:-1])
    assert sizes[-1] <= tokens


def test_a_recorded_target_counts_where_nobody_plans() -> None:
    lengths = batch([5000, 100, 100])
    replayed, planned = Cut(1000, sliced=True), Cut(1000, by_cost=True, sliced=True)
    assert replayed.micro_batches(lengths, 1000) == planned.micro_batches(lengths)
    assert replayed.micro_batches(lengths) == Cut(1000).micro_batches(lengths)


def test_a_plan_s_target_counts_where_flags_leave_it_open() -> None:
    lengths = batch([5000, 100, 100])
    open_, fixed = Cut(by_cost=True, sliced=True), Cut(1000, by_cost=True, sliced=True)
    assert open_.open
    assert not fixed.open
    assert open_.micro_batches(lengths, 1000) == fixed.micro_batches(lengths, 64)
    assert open_.micro_batches(lengths, 500) != open_.micro_batches(lengths, 1000)


@pytest.mark.parametrize(
    ("slices", "complaint"),
    [
        ([[Slice(0, 0, 3, 9)]], "last slices of sample 0 are missing"),
        ([[Slice(0, 0, 3, 9)], [Slice(0, 4, 9, 9)]], "micro-batch 1 has a slice out of order"),
        ([[Slice(0, 3, 9, 9)], [Slice(0, 0, 3, 9)]], "micro-batch 0 has a slice out of order"),
        ([[Slice(1, 0, 2, 2), Slice(0, 0, 3, 9)]], "a slice that is not its first"),
        ([[Slice(0, 0, 3, 9), Slice(0, 3, 9, 9)]], "a slice that is not its first"),
    ],
)
def test_broken_chains_are_refused(slices: list[list[Slice]], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        chains_of([MicroBatch(tuple(s)) for s in slices])
