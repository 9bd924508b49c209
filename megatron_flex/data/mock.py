"""``--mock-data``: documents drawn from a published length distribution, nothing on disk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_flex.data.errors import DataError
from megatron_flex.data.keyed import IntArray, bits, derive, uniform

# Reconstruction of FLANv2's lengths from its published per-task statistics:
# (weight, median tokens, standard deviation of the logarithm).
MIXTURE = ((0.381, 152, 0.532), (0.501, 280, 0.919), (0.111, 946, 0.205), (0.007, 1418, 1.255))
LONGEST = 65536
_LENGTHS, _TOKENS = 2, 3  # purposes of the seed


def mixture_lengths(seed: int, documents: IntArray) -> IntArray:
    """Tokens of each document, ``[n]`` int64 in ``[2, 65536]``, keyed by (seed, document)."""
    keys = bits(derive(seed, _LENGTHS), documents)
    draws = [uniform(keys, np.full(documents.shape, i)) for i in range(3)]
    weights, medians, sigmas = (np.array(column) for column in zip(*MIXTURE, strict=True))
    part = np.searchsorted(np.cumsum(weights / weights.sum()), draws[0], side="right")
    part = np.minimum(part, len(MIXTURE) - 1)  # the sum of the weights may round to below one
    normal = np.sqrt(-2 * np.log1p(-draws[1])) * np.cos(2 * np.pi * draws[2])  # Box-Muller
    tokens = medians[part] * np.exp(sigmas[part] * normal)
    return np.clip(np.rint(tokens), 2, LONGEST).astype(np.int64)


@dataclass(frozen=True)
class MockDocuments:
    """Documents with lengths of :data:`MIXTURE` and skewed random tokens.

    Tokens follow ``vocab_size * u**3`` with uniform u, so that a model has something to learn (the
    frequencies). They are keyed by (seed, document, position).
    """

    vocab_size: int
    seed: int
    num_documents: int = 1 << 20

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.num_documents < 1:
            raise DataError("--mock-data needs a vocabulary and at least one document")

    @property
    def name(self) -> str:
        """For messages."""
        return "mock data"

    def lengths(self, documents: IntArray) -> IntArray:
        """Tokens of each document, ``[n]`` int64."""
        return mixture_lengths(self.seed, documents)

    def num_sentences(self, documents: IntArray) -> IntArray:
        """Two for each document, ``[n]`` int64."""
        return np.full(documents.shape, 2, dtype=np.int64)

    def sequence_lengths(self, documents: IntArray) -> IntArray:
        """Tokens of each sequence of all these documents, one after the other, int64."""
        parts = [self.sentences(document) for document in documents.tolist()]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def sentences(self, document: int) -> IntArray:
        """Two sentences of half the document each, so that a sentence-order head has a target."""
        total = int(self.lengths(np.array([document]))[0])
        return np.array([total // 2, total - total // 2], dtype=np.int64)

    def read(self, document: int, start: int, stop: int) -> IntArray:
        """Tokens ``[start, stop)`` of a document, int64."""
        draws = uniform(derive(self.seed, _TOKENS, document), np.arange(start, stop))
        return (self.vocab_size * draws**3).astype(np.int64)
