"""Samples of conversations: what is read back of what was written."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_flex.data.chat import ChatSamples
from megatron_flex.data.errors import DataError
from megatron_flex.data.indexed import IndexedDocuments
from megatron_flex.data.samples import Overlong
from tests.unit.data.files import write

Sentences = list[list[int]]
conversations = st.lists(
    st.lists(st.integers(0, 5), max_size=7), min_size=1, max_size=8
)  # lengths of each conversation's sequences


def tokens_of(lengths: list[list[int]]) -> list[Sentences]:
    """Documents in which every token differs from every other."""
    following = iter(range(10, 60_000))
    return [[[next(following) for _ in range(n)] for n in document] for document in lengths]


def make(directory: Path, documents: list[Sentences], **options: object) -> ChatSamples:
    prefix = write(directory / "data", [*documents, [[1], [2, 3]]])
    return ChatSamples(IndexedDocuments(prefix), **options)  # type: ignore[arg-type]


@example([[2, 3, 2, 3]], 3, Overlong.TRUNCATE)
@example([[2, 3, 2, 3], [0, 1, 0, 4]], 8, Overlong.TRUNCATE)
@given(
    conversations,
    st.none() | st.integers(2, 16),
    st.sampled_from([Overlong.TRUNCATE, Overlong.DROP]),
)
def test_every_second_sequence_counts_and_a_cut_is_after_one(
    lengths: list[list[int]], limit: int | None, overlong: Overlong
) -> None:
    documents = tokens_of(lengths)
    expected = []
    for document in [*documents, [[1], [2, 3]]]:
        tokens = [t for sequence in document for t in sequence]
        counts = [i % 2 == 1 for i, sequence in enumerate(document) for _ in sequence]
        ends = [
            sum(map(len, document[: i + 1]))
            for i in range(1, len(document), 2)
            if document[i] and (i > 1 or len(document[0]) + len(document[1]) > 1)
        ]
        ends = [end for end in ends if end > 1]
        fits = [end for end in ends if limit is None or end - 1 <= limit]
        if not fits or (overlong is Overlong.DROP and fits != ends):
            continue
        expected.append((tokens[: fits[-1]], counts[: fits[-1]]))
    with tempfile.TemporaryDirectory() as directory:
        made = make(Path(directory), documents, max_length=limit, overlong=overlong)
        index = np.arange(made.selection.size)
        assert made.lengths(index).tolist() == [len(t) - 1 for t, _ in expected]
        assert made.loss_tokens(index).tolist() == [[sum(c[1:])] for _, c in expected]
        for i, (tokens, counts) in enumerate(expected):
            for start, stop in ((0, len(tokens) - 1), (len(tokens) // 2, len(tokens) - 1)):
                if start == stop:
                    continue
                row = made.read(i, 0, start, stop, inputs=True, targets=True)
                assert row.tokens is not None
                assert row.labels is not None
                assert row.loss_mask is not None
                assert row.tokens.tolist() == tokens[start:stop]
                assert row.labels.tolist() == tokens[start + 1 : stop + 1]
                assert row.loss_mask.tolist() == counts[start + 1 : stop + 1]
                alone = made.read(i, 0, start, stop, inputs=True, targets=False)
                assert alone.tokens is not None
                assert alone.tokens.tolist() == row.tokens.tolist()
                assert alone.labels is None


def test_what_is_cut_and_dropped_is_counted(tmp_path: Path) -> None:
    # Inputs are 9 (cut to 4), 11 (its first answer ends too late) and 2.
    documents = tokens_of([[2, 3, 2, 3], [9, 3], []])
    counts = make(tmp_path, documents, max_length=5).selection.counts
    assert (counts.documents, counts.samples, counts.truncated) == (4, 2, 1)
    assert (counts.cut_tokens, counts.dropped_tokens, counts.no_target) == (5, 11, 1)
    assert counts.dropped == 1
    assert counts.tokens == 9 + 11 + 2
    assert str(counts.warning(5)).endswith(" 5: raise it"), "no advice that is refused"
    counts = make(tmp_path, documents, max_length=5, overlong=Overlong.DROP).selection.counts
    assert (counts.samples, counts.dropped, counts.dropped_tokens) == (1, 2, 20)
    with pytest.raises(DataError, match="document 1 has 11 input tokens"):
        make(tmp_path, documents, max_length=5, overlong=Overlong.ERROR)


def test_later_parts_of_a_conversation_are_no_samples(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--overlong split is not for conversations"):
        make(tmp_path, [], overlong=Overlong.SPLIT)


def test_texts_are_no_conversations(tmp_path: Path) -> None:
    documents = IndexedDocuments(write(tmp_path / "text", [[[1, 2, 3]], [[4, 5]]]))
    with pytest.raises(DataError, match="has no token that the loss would be on"):
        ChatSamples(documents)
