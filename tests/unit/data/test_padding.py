"""Padded micro-batches: totals by hand, what holds of all of them, and what their tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.cut import PADS, Cut
from megatron_flex.data.dynapipe import DynaPipe, Stage, StageTime
from megatron_flex.data.errors import DataError
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.data.packed import PackedBatch
from megatron_flex.data.padding import ORDERS, pad_by_bucket, pad_by_count
from megatron_flex.planner.build import Batch

LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=40)
STAGE = Stage(StageTime(50.0, 1.0, 0.002), 4000.0)
DYNAPIPE = DynaPipe(2, 2, STAGE, Stage(STAGE.seconds, 8000.0))


def batch(lengths: Sequence[int], first: int = 100) -> GlobalBatch:
    return GlobalBatch(first, np.array(lengths, dtype=np.int64), (sum(lengths),))


def shapes(parts: Sequence[MicroBatch]) -> list[tuple[int, int]]:
    """Samples and padded tokens of each."""
    return [(len(m.slices), m.padded) for m in parts]


def test_by_count_pads_to_the_longest_of_the_batch_or_of_the_micro_batch() -> None:
    five = batch([100, 30, 70, 500, 20])
    parts = pad_by_count(five, 2)
    assert shapes(parts) == [(2, 500), (2, 500), (1, 500)]
    assert sum(m.tokens for m in parts) == 2500  # 720 of them are samples'
    assert shapes(pad_by_count(batch([100, 30]), 2, 2048)) == [(2, 2048)]
    assert shapes(pad_by_count(five, 2, alike=False)) == [(2, 100), (2, 500), (1, 20)]


def test_by_bucket_pads_neighbours_to_the_longest_of_them() -> None:
    parts = pad_by_bucket(batch([100, 30, 70, 500, 20]), 210)
    # 20, 30, 70 as three of 70 fill 210; 100 alone, for two of 500 are too many.
    assert shapes(parts) == [(3, 70), (1, 100), (1, 500)]
    assert [s.sample for s in parts[0].slices] == [101, 102, 104]
    assert sum(m.tokens for m in parts) == 810


def test_the_orders_of_entry_are_of_the_same_micro_batches() -> None:
    lengths = batch([10, 20, 40, 80, 160])
    ascending, tent, descending = (pad_by_bucket(lengths, 1, order) for order in range(3))
    assert [m.padded for m in ascending] == [10, 20, 40, 80, 160]
    assert [m.padded for m in tent] == [10, 40, 160, 80, 20]
    assert descending == ascending[::-1]


def test_a_batch_knows_computed_tokens_and_pairs() -> None:
    found = Batch.of(pad_by_bucket(batch([60, 70, 65, 500]), 210))
    assert list(found.tokens) == [210, 500]
    assert list(found.squares) == [3 * 70 * 70, 500 * 500]
    assert not found.chains


@given(LENGTHS, st.integers(1, 8), st.integers(0, 6000), st.booleans())
def test_by_count_computes_every_sample(
    lengths: list[int], size: int, least: int, alike: bool
) -> None:
    parts = pad_by_count(batch(lengths), size, least, alike=alike)
    assert [s.sample - 100 for m in parts for s in m.slices] == list(range(len(lengths)))
    assert all(1 <= len(m.slices) <= size for m in parts)
    for m in parts:
        longest = lengths if alike else [s.tokens for s in m.slices]
        assert m.padded == max(least, *longest, 1)


@given(LENGTHS, st.integers(1, 8000), st.integers(0, len(ORDERS) - 1))
def test_by_bucket_keeps_to_the_budget(lengths: list[int], budget: int, order: int) -> None:
    parts = pad_by_bucket(batch(lengths), budget, order)
    assert sorted(s.sample - 100 for m in parts for s in m.slices) == list(range(len(lengths)))
    assert all(m.tokens <= budget or len(m.slices) == 1 for m in parts)
    assert all(m.padded == max(s.tokens for s in m.slices) for m in parts)


@given(LENGTHS, st.sampled_from(PADS))
def test_a_cut_computes_every_sample_once_in_all_of_its_ways(lengths: list[int], pad: str) -> None:
    cut = Cut(300, 3, pad=pad, dynapipe=DYNAPIPE)
    assert Cut.from_json(asdict(cut)) == cut
    whole = batch(lengths)
    seen = []
    for way in cut.ways(whole) if cut.open else [0]:
        parts = cut.micro_batches(whole, way)
        assert parts == cut.micro_batches(whole, way)
        samples = sorted((s.sample - 100, s.tokens) for m in parts for s in m.slices)
        assert samples == list(enumerate(lengths))
        seen.append(parts)
    if pad == "dynapipe":
        assert len(set(seen)) == len(seen)


def test_a_way_that_there_is_not_is_refused() -> None:
    with pytest.raises(DataError, match="is 1 to 24, not 25"):
        Cut(pad="dynapipe", dynapipe=DYNAPIPE).micro_batches(batch([3]), 25)


def test_a_micro_batch_pads_whole_samples_only() -> None:
    with pytest.raises(ValueError, match="whole samples of at most 9 tokens"):
        MicroBatch((Slice.all_of(0, 10),), 9)
    with pytest.raises(ValueError, match="whole samples"):
        MicroBatch((Slice(0, 0, 5, 10),), 20)


def test_padding_is_behind_each_sample_and_weighs_nothing() -> None:
    packed = PackedBatch(
        lengths=(2, 3), samples=(7, 9), starts=(0, 0), tokens=torch.tensor([1, 2, 3, 4, 5]),
        labels=torch.tensor([2, 3, 4, 5, 6]), loss_mask=torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]),
        token_types=torch.tensor([0, 1, 0, 1, 1]),
    )  # fmt: skip
    found = packed.padded(4)
    assert (found.lengths, found.counted, found.num_tokens) == ((4, 4), (2, 3), 8)
    assert found.tokens is not None
    assert found.tokens.tolist() == [1, 2, 0, 0, 3, 4, 5, 0]
    assert found.labels is not None
    assert found.labels.tolist() == [2, 3, 0, 0, 4, 5, 6, 0]
    assert found.loss_mask is not None
    assert found.loss_mask.tolist() == [1, 1, 0, 0, 1, 0, 1, 0]
    assert found.positions.tolist() == [0, 1, 2, 3] * 2
    assert found.token_types is not None
    assert found.token_types.tolist() == [0, 1, 0, 0, 0, 1, 1, 0]
    assert all(s.whole for s in found.slices)
    with pytest.raises(ValueError, match="at most 2 tokens"):
        packed.padded(2)


def test_padding_behind_a_pack_is_one_more_sample_that_weighs_nothing() -> None:
    packed = PackedBatch(
        lengths=(2, 3), samples=(7, 9), starts=(4, 0), totals=(8, 3),
        tokens=torch.tensor([1, 2, 3, 4, 5]), labels=torch.tensor([2, 3, 4, 5, 6]),
        loss_mask=torch.ones(5), sentence_order=torch.tensor([1, 0]),
    )  # fmt: skip
    found = packed.with_tail(3)
    assert (found.lengths, found.num_tokens, found.counted) == ((2, 3, 3), 8, ())
    assert found.slices == (*packed.slices, Slice.all_of(7, 3))
    assert found.cut == packed.cut
    assert found.tokens is not None
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert found.loss_mask is not None
    assert found.loss_mask.tolist() == [1] * 5 + [0] * 3
    assert found.sentence_order is not None
    assert found.sentence_order.tolist() == [1, 0, -1]
    assert found.token_types is None
    assert found.positions.tolist() == [4, 5, 0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="padded already"):
        PackedBatch((3,), (0,), (0,)).padded(4).with_tail(1)
