from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.bert import BertSamples
from megatron_flex.data.errors import DataError
from megatron_flex.data.indexed import IndexedDocuments
from megatron_flex.data.masking import BertVocabulary
from megatron_flex.data.samples import Overlong, Row
from tests.unit.data.files import write

CLS, SEP, MASK = 1, 2, 3
VOCABULARY = BertVocabulary(60_000, CLS, SEP, MASK)

sentence_lengths = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=6
)


def counting(lengths: list[list[int]]) -> list[list[list[int]]]:
    """Documents of sentences in which every token differs from every other."""
    following = iter(range(100, 10**6))
    return [[[next(following) for _ in range(n)] for n in document] for document in lengths]


def make(
    directory: Path, lengths: list[list[int]], seed: int = 1, **options: object
) -> BertSamples:
    documents = IndexedDocuments(write(directory / "d", counting(lengths), np.int32))
    return BertSamples(documents, VOCABULARY, seed, **options)  # type: ignore[arg-type]


def unmasked(row: Row) -> np.ndarray:
    """The tokens before masking."""
    assert row.tokens is not None
    assert row.labels is not None
    assert row.loss_mask is not None
    return np.where(row.loss_mask > 0, row.labels, row.tokens)


def megatron_cut(a: int, b: int, room: int) -> tuple[int, int]:
    """Lengths of the two segments as megatron-core cuts them, token by token."""
    while a + b > room:
        if a > b:
            a -= 1
        else:
            b -= 1
    return a, b


@given(
    sentence_lengths.filter(lambda d: any(len(s) > 1 for s in d)),
    st.none() | st.integers(4, 40),
    st.integers(0, 10**6),
)
def test_two_segments_of_one_document_with_a_border_between_sentences(
    lengths: list[list[int]], limit: int | None, number: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        made = make(Path(directory), lengths, max_length=limit)
        documents = [d for d in counting(lengths) if len(d) > 1]
        index = np.arange(made.selection.size)
        totals = [min(sum(map(len, d)) + 3, limit or 10**6) for d in documents]
        assert made.lengths(index).tolist() == totals
        for i, document in enumerate(documents):
            row = made.read(i, number, 0, totals[i], inputs=True, targets=True)
            assert row.loss_mask is not None
            assert row.token_types is not None
            tokens = unmasked(row).tolist()
            first_end = tokens.index(SEP)
            a, b = tokens[1:first_end], tokens[first_end + 1 : -1]
            assert tokens == [CLS, *a, SEP, *b, SEP]
            assert row.token_types.tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
            assert row.sentence_order in (0, 1)
            text = [t for s in document for t in s]
            candidates = []
            for pivot in range(1, len(document)):
                size = sum(len(s) for s in document[:pivot])
                parts = [text[:size], text[size:]]
                if row.sentence_order == 1:
                    parts.reverse()
                candidates.append(parts)
            assert any(
                (len(a), len(b)) == megatron_cut(len(x), len(y), totals[i] - 3)
                and "".join(map(chr, a)) in "".join(map(chr, x))
                and "".join(map(chr, b)) in "".join(map(chr, y))
                for x, y in candidates
            )


@given(sentence_lengths, st.none() | st.integers(3, 40), st.floats(0.01, 0.99))
def test_without_the_head_a_document_is_one_segment(
    lengths: list[list[int]], limit: int | None, probability: float
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        made = make(
            Path(directory), lengths, binary_head=False, max_length=limit, mask_prob=probability
        )
        assert made.num_losses == 1
        index = np.arange(made.selection.size)
        assert made.selection.size == len(lengths)
        for i, total in enumerate(made.lengths(index).tolist()):
            row = made.read(i, i, 0, total, inputs=True, targets=True)
            tokens = unmasked(row)
            assert tokens[0] == CLS
            assert tokens[-1] == SEP
            assert (np.diff(tokens[1:-1]) == 1).all()
            assert row.token_types is None
            assert row.sentence_order is None


@given(sentence_lengths, st.integers(0, 1000), st.floats(0.01, 0.99), st.booleans())
def test_the_number_of_targets_is_known_from_the_lengths(
    lengths: list[list[int]], number: int, probability: float, head: bool
) -> None:
    if head and not any(len(d) > 1 for d in lengths):
        return
    with tempfile.TemporaryDirectory() as directory:
        made = make(Path(directory), lengths, binary_head=head, mask_prob=probability)
        index = np.arange(made.selection.size)
        targets = made.loss_tokens(index)
        for i, total in enumerate(made.lengths(index).tolist()):
            row = made.read(i, number, 0, total, inputs=False, targets=True)
            assert row.loss_mask is not None
            assert row.tokens is None
            assert row.loss_mask.sum() == targets[i, 0]
            specials = 3 if head else 2
            assert targets[i, 0] == min(max(1, round(total * probability)), total - specials)
            if head:
                assert targets[i, 1] == 1


def test_masks_are_keyed_by_sample_number_and_seed(tmp_path: Path) -> None:
    made = make(tmp_path, [[40, 40]], seed=1)
    other = BertSamples(made._documents, VOCABULARY, 2)

    def mask(samples: BertSamples, number: int) -> list[float]:
        row = samples.read(0, number, 0, 83, inputs=True, targets=True)
        assert row.loss_mask is not None
        return row.loss_mask.tolist()

    assert mask(made, 7) == mask(made, 7)
    assert len({tuple(m) for m in (mask(made, 7), mask(made, 8), mask(other, 7))}) == 3


def test_inputs_and_targets_read_apart_belong_together(tmp_path: Path) -> None:
    made = make(tmp_path, [[20, 20]])
    both = made.read(0, 3, 0, 43, inputs=True, targets=True)
    inputs = made.read(0, 3, 0, 43, inputs=True, targets=False)
    targets = made.read(0, 3, 0, 43, inputs=False, targets=True)
    assert np.array_equal(inputs.tokens, both.tokens)  # type: ignore[arg-type]
    assert np.array_equal(targets.labels, both.labels)  # type: ignore[arg-type]
    assert np.array_equal(targets.loss_mask, both.loss_mask)  # type: ignore[arg-type]
    assert targets.sentence_order == both.sentence_order
    assert inputs.labels is None
    assert inputs.sentence_order is None


def test_segments_are_swapped_half_of_the_time(tmp_path: Path) -> None:
    made = make(tmp_path, [[5, 5]])
    orders = [
        made.read(0, n, 0, 13, inputs=False, targets=True).sentence_order for n in range(1000)
    ]
    assert 420 < orders.count(1) < 580


@pytest.mark.parametrize("room", [6, 7, 12, 13])
def test_two_long_segments_share_the_room_and_the_first_has_the_odd_token(
    tmp_path: Path, room: int
) -> None:
    made = make(tmp_path, [[9, 9]], max_length=room + 3)
    for number in range(8):
        tokens = unmasked(made.read(0, number, 0, room + 3, inputs=True, targets=True)).tolist()
        a = tokens.index(SEP) - 1
        assert (a, room - a) == megatron_cut(9, 9, room) == (room - room // 2, room // 2)


def test_tokens_are_cut_at_the_front_as_often_as_at_the_end(tmp_path: Path) -> None:
    # Of 12 tokens 8 stay: 0 to 4 go at the front, as heads in four throws of a coin.
    made = make(tmp_path, [[12]], binary_head=False, max_length=10)
    fronts = [
        int(unmasked(made.read(0, n, 0, 10, inputs=True, targets=True))[1]) - 100
        for n in range(800)
    ]
    assert np.bincount(fronts).tolist() == pytest.approx([50, 200, 300, 200, 50], abs=45)


def test_two_equal_sentences_are_each_cut_at_both_ends(tmp_path: Path) -> None:
    # Of 12 tokens of each sentence 6 stay: 0 to 6 go at the front, each by a coin of its own.
    made = make(tmp_path, [[12, 12]], max_length=15)
    fronts = np.zeros((7, 7))
    for number in range(600):
        tokens = unmasked(made.read(0, number, 0, 15, inputs=True, targets=True))
        segments = sorted((tokens[1:7] - 100, tokens[8:14] - 100), key=lambda s: int(s[0]))
        assert all((np.diff(segment) == 1).all() for segment in segments)
        fronts[int(segments[0][0]), int(segments[1][0]) - 12] += 1
    coins = np.array([1, 6, 15, 20, 15, 6, 1]) / 64
    assert fronts.sum(axis=1) / 600 == pytest.approx(coins, abs=0.08)
    assert fronts.sum(axis=0) / 600 == pytest.approx(coins, abs=0.08)
    assert fronts / 600 == pytest.approx(np.outer(coins, coins), abs=0.05)  # apart


def test_a_document_of_one_sentence_is_counted_with_the_head_and_used_without(
    tmp_path: Path,
) -> None:
    lengths = [[9], [4, 5], [], [3]]
    made = make(tmp_path, lengths)
    assert made.selection.counts.no_target == 3
    assert made.selection.documents(np.arange(1)).tolist() == [1]
    made = make(tmp_path, lengths, binary_head=False)
    assert made.selection.counts.no_target == 1
    assert made.selection.documents(np.arange(3)).tolist() == [0, 1, 3]


def test_overlong_samples_count_special_tokens(tmp_path: Path) -> None:
    made = make(tmp_path, [[5, 5], [5, 6]], max_length=13, overlong=Overlong.DROP)
    assert made.selection.counts.dropped == 1
    with pytest.raises(DataError, match="no room for text beside 3 special tokens"):
        make(tmp_path, [[5, 5]], max_length=3)


def test_a_sample_cannot_be_cut_to_slices(tmp_path: Path) -> None:
    made = make(tmp_path, [[5, 5]])
    with pytest.raises(DataError, match=r"of 13 tokens was cut to \[0, 7\)"):
        made.read(0, 0, 0, 7, inputs=True, targets=True)


def test_an_overlong_segment_is_cut_at_both_ends(tmp_path: Path) -> None:
    made = make(tmp_path, [[40]], binary_head=False, max_length=22)
    firsts = []
    for number in range(400):
        row = made.read(0, number, 0, 22, inputs=True, targets=True)
        tokens = unmasked(row)[1:-1]
        assert (np.diff(tokens) == 1).all()
        firsts.append(int(tokens[0]) - 100)
    # Each of the 20 tokens that go is the first or the last by a coin.
    assert 0 < min(firsts) < max(firsts) < 20
    assert abs(np.mean(firsts) - 10) < 0.6
    assert abs(np.var(firsts) - 5) < 2


@pytest.mark.parametrize("binary_head", [True, False])
@given(
    lengths=sentence_lengths.filter(lambda d: any(len(s) > 1 for s in d)),
    limit=st.integers(7, 20),
    number=st.integers(0, 10**6),
)
def test_the_parts_of_long_documents_have_every_token_once(
    binary_head: bool, lengths: list[list[int]], limit: int, number: int
) -> None:
    specials = 3 if binary_head else 2
    with tempfile.TemporaryDirectory() as directory:
        made = make(
            Path(directory), lengths, max_length=limit, overlong=Overlong.SPLIT,
            binary_head=binary_head,
        )  # fmt: skip
        found: list[int] = []
        for i in range(made.selection.size):
            (length,) = made.lengths(np.array([i])).tolist()
            assert specials + (2 if binary_head else 1) <= length <= limit
            row = made.read(i, number, 0, length, inputs=True, targets=True)
            tokens = [t for t in unmasked(row).tolist() if t not in (CLS, SEP)]
            assert len(tokens) == length - specials
            if row.sentence_order:
                assert row.token_types is not None
                first = int((row.token_types == 0).sum()) - 2
                tokens = tokens[first:] + tokens[:first]
            found += tokens
        documents = [d for d in counting(lengths) if len(d) > 1 or not binary_head]
        assert found == [t for document in documents for sentence in document for t in sentence]
        assert made.selection.counts.lost == 0
        room = limit - specials
        assert made.selection.size == sum(-(-sum(map(len, d)) // room) for d in documents)


def test_parts_of_documents_need_room(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--max-sample-length 6 leaves no room for text"):
        make(tmp_path, [[9, 9]], max_length=6, overlong=Overlong.SPLIT)
