"""BERT's masked tokens: how many depends on the length alone, which ones on (seed, sample).

As megatron-core's ``MaskedWordPieceDataset`` with the settings of Megatron's ``pretrain_bert.py``:
whole words, runs of one to three words with probabilities 6/11, 3/11, 2/11, and of the chosen
tokens 80 % become the mask token, 10 % a random one, 10 % stay. One difference: Megatron leaves out
a run that would exceed the wanted number, so that its count depends on the text; here the last
word is cut, so that the number of targets of any future batch is known from the index.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_flex.data.keyed import IntArray, below, derive, uniform

MAX_NGRAM = 3


@dataclass(frozen=True, eq=False)
class BertVocabulary:
    """What masking needs of a tokenizer.

    Attributes:
        size: random replacements are drawn from ``[0, size)``.
        cls, sep, mask: ids of the special tokens.
        continuation: ``[size]`` bool, true for tokens that continue a word (``##…``); ``None``
            when each token is a word.
    """

    size: int
    cls: int
    sep: int
    mask: int
    continuation: npt.NDArray[np.bool_] | None = None


def mask_counts(lengths: IntArray, specials: int, probability: float) -> IntArray:
    """Masked tokens of samples of ``lengths`` tokens, ``specials`` of them special; ``[n]`` int64.

    Megatron's ``max(1, round(length * mask_prob))``, at most all that can be masked.
    """
    wanted = np.maximum(1, np.rint(lengths * probability)).astype(np.int64)
    return np.minimum(wanted, lengths - specials)


def choose(tokens: IntArray, candidates: IntArray, count: int, key: int,
           continuation: npt.NDArray[np.bool_] | None) -> IntArray:  # fmt: skip
    """Positions to mask: ``count`` of ``candidates`` (ascending positions that are not special).

    Runs of words start at random places in random order; a word is due when the first run that
    covers it comes up. Words are taken as they become due.
    """
    fresh = np.ones(len(candidates), dtype=bool)
    if continuation is not None:
        # A continuation after a gap (a special token) has no word to continue.
        fresh[1:] = ~continuation[tokens[candidates[1:]]] | (np.diff(candidates) > 1)
    word = np.cumsum(fresh) - 1  # word number of each candidate
    words = int(word[-1]) + 1
    numbers = np.arange(words)
    rank = np.empty(words, dtype=np.int64)
    rank[np.argsort(uniform(derive(key, 0), numbers), kind="stable")] = numbers
    odds = np.cumsum(1.0 / np.arange(1, MAX_NGRAM + 1))
    run = 1 + np.searchsorted(odds / odds[-1], uniform(derive(key, 1), numbers), side="right")
    due = rank.copy()
    for reach in range(1, min(MAX_NGRAM, words)):  # runs that start ``reach`` words earlier
        due[reach:] = np.minimum(due[reach:], np.where(run[:-reach] > reach, rank[:-reach], words))
    # By due time, then from left to right; within a word too, so only a last word is cut.
    order = np.lexsort((candidates, due[word]))
    return np.sort(candidates[order[:count]])


def replace(
    tokens: IntArray, positions: IntArray, key: int, vocabulary: BertVocabulary
) -> IntArray:
    """A copy of ``tokens`` with 80 % / 10 % / 10 % mask / random / unchanged at ``positions``."""
    result = tokens.copy()
    draw = uniform(derive(key, 2), positions)
    random = below(derive(key, 3), positions, vocabulary.size)
    result[positions] = np.where(
        draw < 0.8, vocabulary.mask, np.where(draw < 0.9, random, tokens[positions])
    )
    return result
