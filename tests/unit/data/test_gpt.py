from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.errors import DataError
from megatron_flex.data.gpt import GptSamples
from megatron_flex.data.indexed import IndexedDocuments
from megatron_flex.data.samples import Overlong
from tests.unit.data.files import counting, write_flat

document_lengths = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(
    lambda lengths: max(lengths) >= 2
)


def samples(prefix: Path, lengths: list[int], **options: object) -> GptSamples:
    documents = IndexedDocuments(write_flat(prefix, counting(lengths)))
    return GptSamples(documents, **options)  # type: ignore[arg-type]


@given(document_lengths, st.none() | st.integers(1, 12))
def test_inputs_and_labels_are_a_document_shifted_by_one(
    lengths: list[int], limit: int | None
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        made = samples(Path(directory, "d"), lengths, max_length=limit)
        tokens = [d for d in counting(lengths) if len(d) >= 2]
        tokens = [d if limit is None else d[: limit + 1] for d in tokens]
        index = np.arange(made.selection.size)
        assert made.lengths(index).tolist() == [len(d) - 1 for d in tokens]
        assert made.loss_tokens(index).tolist() == [[len(d) - 1] for d in tokens]
        for i, document in enumerate(tokens):
            row = made.read(i, 99, 0, len(document) - 1, inputs=True, targets=True)
            assert row.tokens is not None
            assert row.labels is not None
            assert row.loss_mask is not None
            assert row.tokens.tolist() == document[:-1]
            assert row.labels.tolist() == document[1:]
            assert row.loss_mask.tolist() == [1.0] * (len(document) - 1)


def test_slices_of_a_sample_join_to_the_whole(tmp_path: Path) -> None:
    made = samples(tmp_path / "d", [9])
    parts = [made.read(0, 0, a, b, inputs=True, targets=True) for a, b in ((0, 3), (3, 4), (4, 8))]
    whole = made.read(0, 0, 0, 8, inputs=True, targets=True)
    for name in ("tokens", "labels", "loss_mask"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert np.array_equal(joined, getattr(whole, name))


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    made = samples(tmp_path / "d", [5])
    row = made.read(0, 0, 0, 4, inputs=True, targets=False)
    assert row.tokens is not None
    assert row.labels is None
    assert row.loss_mask is None
    row = made.read(0, 0, 0, 4, inputs=False, targets=True)
    assert row.tokens is None
    assert row.labels is not None
    row = made.read(0, 0, 0, 4, inputs=False, targets=False)
    assert row.tokens is None
    assert row.labels is None


def test_short_and_long_documents_are_counted(tmp_path: Path) -> None:
    lengths = [0, 1, 2, 6, 9, 1]
    made = samples(tmp_path / "a", lengths, max_length=4)
    counts = made.selection.counts
    assert (counts.documents, counts.samples, counts.no_target) == (6, 3, 3)
    assert (counts.truncated, counts.cut_tokens, counts.dropped) == (2, 1 + 4, 0)
    assert str(counts) == (
        "3 samples of 6 documents, 3 skipped without a target, 2 truncated by 5 tokens in all,"
        " 36 % of the tokens lost"
    )
    made = samples(tmp_path / "b", lengths, max_length=4, overlong=Overlong.DROP)
    assert made.selection.counts.dropped == 2
    assert made.selection.counts.truncated == 0
    assert made.lengths(np.arange(made.selection.size)).tolist() == [1]
    assert made.read(0, 0, 0, 1, inputs=True, targets=False).tokens == [11]


@given(document_lengths, st.integers(1, 12), st.integers(0, 3))
def test_the_parts_of_long_documents_have_every_token_once(
    lengths: list[int], limit: int, start: int
) -> None:
    start = min(start, lengths.index(max(lengths)))
    with tempfile.TemporaryDirectory() as directory:
        made = samples(
            Path(directory, "d"), lengths, start=start, max_length=limit, overlong=Overlong.SPLIT
        )
        expected = [
            (d[i : i + limit], d[i + 1 : i + 1 + limit])
            for d in counting(lengths)[start:]
            for i in range(0, len(d) - 1, limit)
        ]
        expected = [(inputs[: len(labels)], labels) for inputs, labels in expected]
        index = np.arange(made.selection.size)
        sizes = [len(inputs) for inputs, _ in expected]
        assert made.lengths(index).tolist() == sizes
        assert made.loss_tokens(index).tolist() == [[n] for n in sizes]
        for i, (inputs, labels) in enumerate(expected):
            row = made.read(i, 0, 0, len(inputs), inputs=True, targets=True)
            assert row.tokens is not None
            assert row.labels is not None
            assert (row.tokens.tolist(), row.labels.tolist()) == (inputs, labels)
        counts = made.selection.counts
        assert counts.divided == sum(n - 1 > limit for n in lengths[start:])
        assert counts.lost == 0
        assert counts.warning(limit) is None


@pytest.mark.parametrize("overlong", [Overlong.TRUNCATE, Overlong.DROP])
def test_a_loss_of_one_percent_of_the_tokens_is_worth_a_warning(
    tmp_path: Path, overlong: Overlong
) -> None:
    # 30 of 100 tokens are within the limit: 10 of the first, and 20 of the two others.
    cut = [81, 11, 11] if overlong is Overlong.TRUNCATE else [71, 11, 11, 11]
    counts = samples(tmp_path / "d", cut, max_length=10, overlong=overlong).selection.counts
    message = "70.0 % of the tokens (70 of 100) are left out: samples are longer than"
    limit = "--max-sample-length (or else --seq-length) 10:"
    warning = counts.warning(10)
    assert warning == f"{message} {limit} raise it, or make several samples of a document with" \
        " --overlong split"  # fmt: skip
    for longest, warned in ((110, False), (112, True)):  # 0.9 % and 1.1 % of the tokens
        made = samples(tmp_path / str(longest), [*[101] * 9, longest], max_length=100)
        assert (made.selection.counts.warning(100) is not None) == warned


def test_an_overlong_sample_is_an_error_if_asked(tmp_path: Path) -> None:
    samples(tmp_path / "a", [3, 9, 5], max_length=8, overlong=Overlong.ERROR)
    with pytest.raises(
        DataError, match=r"document 1 has 8 input tokens, more than --max-sample-length 7; raise it"
    ):
        samples(tmp_path / "b", [3, 9, 5], max_length=7, overlong=Overlong.ERROR)


def test_a_range_of_documents_is_a_split(tmp_path: Path) -> None:
    made = samples(tmp_path / "d", [3, 4, 1, 5, 6], start=1, stop=4)
    assert made.selection.documents(np.arange(2)).tolist() == [1, 3]
    assert made.selection.counts.documents == 3


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of its 2 documents can be a sample"):
        samples(tmp_path / "d", [1, 1, 5], start=0, stop=2)
