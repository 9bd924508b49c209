from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.errors import DataError
from megatron_flex.data.indexed import IndexedDocuments
from megatron_flex.data.pairs import PairSamples
from megatron_flex.data.samples import Overlong
from tests.unit.data.files import counting, write_flat

length_pairs = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=10
).filter(lambda pairs: any(p and c for p, c in pairs))


def make(directory: Path, pairs: list[tuple[int, int]], **options: object) -> PairSamples:
    prompts, completions = (list(lengths) for lengths in zip(*pairs, strict=True))
    return PairSamples(
        IndexedDocuments(write_flat(directory / "prompt", [*counting(prompts), [9]])),
        IndexedDocuments(write_flat(directory / "completion", [*counting(completions, 500), [9]])),
        **options,  # type: ignore[arg-type]
    )


@given(
    length_pairs,
    st.none() | st.integers(1, 16),
    st.sampled_from([o for o in Overlong if o is not Overlong.SPLIT]),
)
def test_the_loss_is_on_the_completion_only(
    pairs: list[tuple[int, int]], limit: int | None, overlong: Overlong
) -> None:
    longest = max(p + c - 1 for p, c in pairs)
    if overlong is Overlong.ERROR and limit is not None and longest > limit:
        return
    expected = []
    prompts, completions = (list(lengths) for lengths in zip(*pairs, strict=True))
    for prompt, completion in [
        *zip(counting(prompts), counting(completions, 500), strict=True),
        ([9], [9]),
    ]:
        tokens = prompt + completion
        if limit is not None and len(tokens) - 1 > limit:
            if overlong is Overlong.DROP and completion and len(tokens) > 1:
                continue
            tokens = tokens[: limit + 1]
        mask = [i >= len(prompt) for i in range(1, len(tokens))]
        if any(mask):
            expected.append((tokens, mask))
    with tempfile.TemporaryDirectory() as directory:
        made = make(Path(directory), pairs, max_length=limit, overlong=overlong)
        index = np.arange(made.selection.size)
        assert made.lengths(index).tolist() == [len(t) - 1 for t, _ in expected]
        assert made.loss_tokens(index).tolist() == [[sum(mask)] for _, mask in expected]
        for i, (tokens, mask) in enumerate(expected):
            row = made.read(i, 0, 0, len(tokens) - 1, inputs=True, targets=True)
            assert row.tokens is not None
            assert row.labels is not None
            assert row.loss_mask is not None
            assert row.tokens.tolist() == tokens[:-1]
            assert row.labels.tolist() == tokens[1:]
            assert row.loss_mask.tolist() == mask


def test_slices_of_a_pair_join_to_the_whole(tmp_path: Path) -> None:
    made = make(tmp_path, [(4, 5)])
    whole = made.read(0, 0, 0, 8, inputs=True, targets=True)
    for cut in range(1, 8):
        parts = [made.read(0, 0, a, b, inputs=True, targets=True) for a, b in ((0, cut), (cut, 8))]
        for name in ("tokens", "labels", "loss_mask"):
            joined = np.concatenate([getattr(part, name) for part in parts])
            assert np.array_equal(joined, getattr(whole, name))


def test_a_completion_that_is_cut_off_leaves_no_target(tmp_path: Path) -> None:
    made = make(tmp_path, [(6, 2), (2, 2)], max_length=5)
    assert (made.selection.counts.no_target, made.selection.counts.dropped) == (0, 1)
    assert made.selection.documents(np.arange(2)).tolist() == [1, 2]


def test_prompts_and_completions_must_be_as_many(tmp_path: Path) -> None:
    prompts = IndexedDocuments(write_flat(tmp_path / "p", [[1], [2]]))
    completions = IndexedDocuments(write_flat(tmp_path / "c", [[1]]))
    with pytest.raises(DataError, match=r"has 2 documents and .* 1"):
        PairSamples(prompts, completions)


def test_a_completion_beyond_the_limit_counts_as_lost(tmp_path: Path) -> None:
    # Inputs are 9, 14 and 1 tokens; of the second pair no target is left, of the first 6 remain.
    made = make(tmp_path, [(3, 7), (9, 6)], max_length=6)
    counts = made.selection.counts
    assert (counts.cut_tokens, counts.dropped_tokens, counts.tokens) == (3, 14, 24)
    warning = counts.warning(6)
    assert warning is not None
    assert warning.startswith("70.8 % of the tokens (17 of 24)")


@given(length_pairs, st.integers(1, 12))
def test_the_parts_of_long_pairs_have_every_completion_token_once(
    pairs: list[tuple[int, int]], limit: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        made = make(Path(directory), pairs, max_length=limit, overlong=Overlong.SPLIT)
        found: list[int] = []
        inputs = 0
        for i in range(made.selection.size):
            (length,) = made.lengths(np.array([i])).tolist()
            assert 1 <= length <= limit
            row = made.read(i, 0, 0, length, inputs=True, targets=True)
            assert row.tokens is not None
            assert row.labels is not None
            assert row.loss_mask is not None
            assert row.tokens[1:].tolist() == row.labels[:-1].tolist()
            targets = row.labels[row.loss_mask > 0].tolist()
            assert made.loss_tokens(np.array([i])).tolist() == [[len(targets)]]
            assert targets, "a sample without a target"
            found += targets
            inputs += length
            cut = length // 2  # a slice of it is the same tokens
            part = made.read(i, 0, cut, length, inputs=True, targets=True)
            assert part.tokens is not None
            assert part.loss_mask is not None
            assert part.tokens.tolist() == row.tokens[cut:].tolist()
            assert part.loss_mask.tolist() == row.loss_mask[cut:].tolist()
        completions = counting([c for _, c in pairs], 500)
        expected = [t[0 if p else 1 :] for (p, c), t in zip(pairs, completions, strict=True) if c]
        assert found == [*(token for tokens in expected for token in tokens), 9]
        counts = made.selection.counts
        assert counts.tokens == inputs + counts.dropped_tokens
        assert counts.divided == sum(bool(c) and p + c - 1 > limit for p, c in pairs)
