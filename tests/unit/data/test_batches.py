from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.batches import BatchSource
from megatron_flex.data.bert import BertSamples
from megatron_flex.data.blend import BlendOrder
from megatron_flex.data.errors import DataError
from megatron_flex.data.gpt import GptSamples
from megatron_flex.data.indexed import IndexedDocuments
from megatron_flex.data.masking import BertVocabulary
from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.data.microbatches import CostCoefficients, cut_by_tokens
from megatron_flex.data.mock import MockDocuments
from megatron_flex.data.order import EpochOrder
from tests.unit.data.files import write_flat


def mock(seed: int = 1, size: int = 200) -> GptSamples:
    return GptSamples(MockDocuments(1000, seed, size), max_length=512)


def source(seed: int = 1) -> BatchSource:
    return BatchSource([mock(seed)], EpochOrder((200,), seed))


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_any_future_batch_is_known_from_the_index(first: int, size: int) -> None:
    batch = source().batch(first, size)
    assert (batch.first_sample, batch.size) == (first, size)
    assert batch.denominators == (batch.tokens,) == (int(batch.lengths.sum()),)
    halves = [source().batch(first, size // 2 or 1), source().batch(first + size // 2, size)]
    assert batch.lengths[: size // 2].tolist() == halves[0].lengths[: size // 2].tolist()
    assert batch.lengths[size // 2 :].tolist() == halves[1].lengths[: size - size // 2].tolist()


def test_lengths_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="read-only"):
        source().batch(0, 4).lengths[0] = 1


@pytest.mark.parametrize("kind", ["gpt", "bert", "blend"])
def test_targets_of_all_micro_batches_sum_to_the_denominators(kind: str) -> None:
    order: EpochOrder | BlendOrder = EpochOrder((200,), 3)
    if kind == "gpt":
        made = BatchSource([mock()], order)
    elif kind == "bert":
        vocabulary = BertVocabulary(1000, 1, 2, 3)
        bert = BertSamples(MockDocuments(1000, 1, 200), vocabulary, 5, max_length=512)
        made = BatchSource([bert], order)
    else:
        order = BlendOrder((200, 50), (0.25, 0.75), 3)
        made = BatchSource([mock(1, 200), mock(2, 50)], order)
    batch = made.batch(17, 30)
    packed = [
        made.packed(m, inputs=True, targets=True)
        for m in cut_by_tokens(batch, 700, CostCoefficients(1, 1e-3))
    ]
    assert (
        sum(float(p.loss_mask.sum()) for p in packed if p.loss_mask is not None)
        == (batch.denominators[0])
    )
    assert sum(p.num_tokens for p in packed) == batch.tokens
    if kind == "bert":
        orders = [o for p in packed if p.sentence_order is not None for o in p.sentence_order]
        assert len(orders) == batch.denominators[1] == 30


def test_samples_packed_together_keep_their_own_tokens_and_targets(tmp_path: Path) -> None:
    # Situation 19: nothing crosses the border between [1, 2, 3] and [4, 5, 6, 7, 8].
    prefix = write_flat(tmp_path / "d", [[1, 2, 3], [4, 5, 6, 7, 8]])
    made = BatchSource([GptSamples(IndexedDocuments(prefix))], EpochOrder((2,), 1))
    batch = made.batch(0, 2)
    slices = tuple(Slice.all_of(i, int(n)) for i, n in enumerate(batch.lengths))
    packed = made.packed(MicroBatch(slices), inputs=True, targets=True)
    alone = [made.packed(MicroBatch((s,)), inputs=True, targets=True) for s in slices]
    for name in ("tokens", "labels", "loss_mask", "positions"):
        parts = torch.cat([getattr(p, name) for p in alone])
        assert torch.equal(getattr(packed, name), parts)
    assert packed.lengths in ((2, 4), (4, 2))
    assert packed.labels is not None
    assert packed.tokens is not None
    assert sorted(packed.labels.tolist()) == [2, 3, 5, 6, 7, 8]
    assert 3 not in packed.tokens
    assert 8 not in packed.tokens


def test_nothing_is_read_where_nothing_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = source()
    batch = made.batch(5, 2)
    slices = tuple(Slice.all_of(5 + i, int(n)) for i, n in enumerate(batch.lengths))

    def refuse(*_: object) -> None:
        raise AssertionError("tokens were read")

    monkeypatch.setattr(MockDocuments, "read", refuse)
    packed = made.packed(MicroBatch(slices), inputs=False, targets=False)
    assert packed.tokens is None
    assert packed.labels is None
    assert packed.loss_mask is None
    assert packed.samples == (5, 6)
    assert packed.starts == (0, 0)
    assert packed.num_tokens == batch.tokens
    with pytest.raises(AssertionError, match="tokens were read"):
        made.packed(MicroBatch(slices), inputs=True, targets=False)


def test_types_are_those_of_the_packed_batch() -> None:
    made = source()
    length = int(made.batch(0, 1).lengths[0])
    packed = made.packed(MicroBatch((Slice.all_of(0, length),)), inputs=True, targets=True)
    assert packed.tokens is not None
    assert packed.tokens.dtype == torch.int64
    assert packed.labels is not None
    assert packed.labels.dtype == torch.int64
    assert packed.loss_mask is not None
    assert packed.loss_mask.dtype == torch.float32


def test_three_validation_rows_make_a_batch_of_three() -> None:
    # Situation 11.
    made = BatchSource([mock(size=3)], EpochOrder((3,), 1, repeat=False))
    assert made.num_samples == 3
    assert made.batch(0, 4).size == 3
    assert made.batch(2, 4).size == 1
    with pytest.raises(DataError, match="no samples 3 to 7: there are 3 samples"):
        made.batch(3, 4)


def test_sets_with_other_losses_do_not_mix() -> None:
    bert = BertSamples(MockDocuments(1000, 1, 9), BertVocabulary(1000, 1, 2, 3), 5)
    with pytest.raises(DataError, match="same losses"):
        BatchSource([mock(size=9), bert], EpochOrder((9, 9), 1))


def test_composition_of_a_large_batch_needs_little_python() -> None:
    made = source()
    assert made.batch(0, 4096).size == 4096
    assert np.unique(made.batch(0, 200).lengths).size > 50
