"""Batches cut to equal costs: packed short samples, and chains of slices of the long ones."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.cut import Cut, chains_of, cut_by_cost
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.data.slices import GRANULE, slices_of_cost, slices_of_tokens
from megatron_flex.planner.build import Batch

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


@given(lengths_lists, cuts, st.sampled_from([2, 16, 32, 128, 100]))
def test_aligned_micro_batches_have_the_same_tokens_and_less_than_a_multiple_of_padding(
    lengths: list[int], cut: Cut, align: int
) -> None:
    aligned = replace(cut, align=align)
    assert Cut.from_json(asdict(aligned)) == aligned
    parts = aligned.micro_batches(batch(lengths))
    for m in parts:
        own = sum(s.tokens for s in m.slices)
        assert m.tokens % align == 0
        assert 0 <= m.tail == m.tokens - own < align
        plain = replace(m, tail=0)
        assert m.squares == plain.squares + m.tail**2
        assert (m.sliced, m.aligned(align)) == (plain.sliced, m)
        if cut.by_cost:  # slices but the last are aligned themselves
            assert m.sliced % align == 0 or m.slices[0].stop == m.slices[0].length
    bare = tuple(replace(m, tail=0) for m in parts)
    if not cut.by_cost:
        assert bare == cut.micro_batches(batch(lengths))
    reached: dict[int, int] = {}
    for piece in (s for m in parts for s in m.slices):
        assert piece.start == reached.get(piece.sample, 0)
        reached[piece.sample] = piece.stop
    assert reached == {1000 + i: n for i, n in enumerate(lengths)}
    found = Batch.of(parts)
    assert list(found.tokens) == [m.tokens for m in parts]
    assert list(found.squares) == [m.squares for m in parts]


@given(lengths_lists, st.sampled_from(["micro-batch", "batch", "bucket"]), st.integers(1, 200))
def test_padded_samples_are_aligned_one_by_one(lengths: list[int], pad: str, align: int) -> None:
    cut = Cut(3000, 3, pad=pad)
    plain = cut.micro_batches(batch(lengths))
    for m, before in zip(
        replace(cut, align=align).micro_batches(batch(lengths)), plain, strict=True
    ):
        assert (m.slices, m.tail) == (before.slices, 0)
        assert m.padded % align == 0
        assert before.padded <= m.padded < before.padded + align


def test_a_micro_batch_is_padded_behind_its_samples_or_behind_each() -> None:
    whole = (Slice.all_of(0, 10), Slice.all_of(1, 7))
    assert MicroBatch(whole).aligned(16) == MicroBatch(whole, tail=15)
    assert MicroBatch(whole).aligned(17) == MicroBatch(whole)
    assert MicroBatch(whole, 10).aligned(16) == MicroBatch(whole, 16)
    assert MicroBatch(whole, tail=15).tokens == 32
    for wrong in ({"padded": 10, "tail": 3}, {"tail": -1}):
        with pytest.raises(ValueError, match="behind"):
            MicroBatch(whole, **wrong)
