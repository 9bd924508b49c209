from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.keyed import derive
from megatron_flex.data.masking import BertVocabulary, choose, mask_counts, replace


@given(st.integers(1, 200), st.data(), st.integers(0, 10**9))
def test_chosen_positions_are_distinct_candidates(size: int, data: st.DataObject, key: int) -> None:
    count = data.draw(st.integers(1, size))
    candidates = np.sort(np.random.default_rng(key).permutation(size * 2)[:size])
    chosen = choose(np.zeros(size * 2, dtype=np.int64), candidates, count, key, None)
    assert len(chosen) == count
    assert len(np.unique(chosen)) == count
    assert np.isin(chosen, candidates).all()


@given(st.lists(st.booleans(), min_size=2, max_size=150), st.data(), st.integers(0, 10**9))
def test_words_are_masked_whole_but_for_one(
    continues: list[bool], data: st.DataObject, key: int
) -> None:
    size = len(continues)
    count = data.draw(st.integers(1, size))
    tokens = np.array(continues, dtype=np.int64)  # token 1 continues a word
    chosen = choose(tokens, np.arange(size), count, key, np.array([False, True]))
    fresh = np.array(continues) == 0
    fresh[0] = True
    words = np.cumsum(fresh) - 1
    partly = 0
    for word in np.unique(words[chosen]):
        members = np.flatnonzero(words == word)
        inside = np.isin(members, chosen)
        if not inside.all():
            partly += 1
            assert not np.any(np.diff(inside.astype(int)) > 0)  # cut at its end
    assert partly <= 1


def test_a_special_token_ends_a_word() -> None:
    # Tokens 0, 1 and, after a special token at position 2, 3 and 4: all continuations.
    tokens = np.ones(5, dtype=np.int64)
    chosen = {
        tuple(choose(tokens, np.array([0, 1, 3, 4]), 2, key, np.array([False, True])).tolist())
        for key in range(50)
    }
    assert chosen == {(0, 1), (3, 4)}


def test_every_position_is_as_likely_as_any_other_away_from_the_ends() -> None:
    size, draws = 60, 4000
    counts = np.zeros(size)
    for key in range(draws):
        counts[choose(np.zeros(size, dtype=np.int64), np.arange(size), 9, derive(key), None)] += 1
    inner = counts[2:]
    assert np.abs(inner - inner.mean()).max() < 5 * np.sqrt(inner.mean())


def test_runs_of_one_two_and_three_words_occur_as_in_megatron() -> None:
    # With one run wanted: P(1), P(2), P(3) are 6/11, 3/11, 2/11; with three tokens wanted, a
    # single run of three appears whenever the first draw says so.
    size, draws = 400, 3000
    threes = 0
    for key in range(draws):
        chosen = choose(np.zeros(size, dtype=np.int64), np.arange(size), 3, derive(key), None)
        threes += int(chosen[2] - chosen[0] == 2)
    assert abs(threes / draws - 2 / 11) < 0.03


def test_replacements_are_80_10_10() -> None:
    vocabulary = BertVocabulary(1000, 1, 2, 3)
    tokens = np.full(50_000, 500)
    result = replace(tokens, np.arange(0, 50_000, 2), 9, vocabulary)
    assert (result[1::2] == 500).all()
    assert (tokens == 500).all()
    changed = result[::2]
    shares = [(changed == 3).mean(), (changed == 500).mean()]
    assert abs(shares[0] - 0.8) < 0.02
    assert abs(shares[1] - 0.1) < 0.02
    others = changed[(changed != 3) & (changed != 500)]
    assert others.min() >= 0
    assert others.max() < 1000
    assert len(np.unique(others)) > 700


def test_counts_are_megatrons() -> None:
    lengths = np.array([3, 4, 10, 103, 512])
    assert mask_counts(lengths, 2, 0.15).tolist() == [1, 1, 2, 15, 77]
    assert mask_counts(np.array([3, 4]), 2, 0.9).tolist() == [1, 2]
