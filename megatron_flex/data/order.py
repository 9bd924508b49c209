"""The training order: which document the n-th consumed sample is.

Each epoch is a permutation of its own, keyed by (seed, epoch) and nothing else, so the order does
not depend on the number of processes or on the plan. The permutation is computed, not stored: a
generalised Feistel network with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002) answers for any positions at once, without an array over all documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Protocol

import numpy as np

from megatron_flex.data.errors import DataError
from megatron_flex.data.keyed import IntArray, below, derive

_PURPOSE = 1  # keeps this use of the seed apart from all others
_ROUNDS = 12  # even tiny domains are uniform then (tested on all permutations of 3 and 4)


@dataclass(frozen=True)
class Permutation:
    """A pseudo-random permutation of ``range(size)``."""

    size: int
    key: int

    def __call__(self, positions: IntArray) -> IntArray:
        """The images of ``positions`` (``[n]`` int64, each in ``[0, size)``)."""
        result = self._encrypt(positions)
        outside = np.flatnonzero(result >= self.size)
        while outside.size:  # cycle walking: the domain is at most sqrt(size) larger than size
            result[outside] = self._encrypt(result[outside])
            outside = outside[result[outside] >= self.size]
        return result

    def _encrypt(self, positions: IntArray) -> IntArray:
        columns = isqrt(self.size - 1) + 1
        rows = -(-self.size // columns)
        left, right = np.divmod(positions, columns)
        for number in range(0, _ROUNDS, 2):
            left = (left + below(derive(self.key, number), right, rows)) % rows
            right = (right + below(derive(self.key, number + 1), left, columns)) % columns
        return left * columns + right


class Order(Protocol):
    """Maps consumed-sample numbers to samples of one or several sets."""

    @property
    def num_samples(self) -> int | None:
        """How many samples there are in all; ``None`` when epochs follow each other for ever."""

    def locate(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """For each consumed-sample number: the number of its set, and its index in that set."""


@dataclass(frozen=True)
class EpochOrder:
    """All samples of the sets (``sizes``), shuffled together anew in each epoch.

    With ``repeat=False`` there is one epoch only (validation on all rows).
    """

    sizes: tuple[int, ...]
    seed: int
    repeat: bool = True

    def __post_init__(self) -> None:
        if sum(self.sizes) < 1:
            raise DataError("there is no sample to draw from")

    @property
    def num_samples(self) -> int | None:
        """See :class:`Order`."""
        return None if self.repeat else sum(self.sizes)

    def locate(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """See :class:`Order`. Costs well under a millisecond for 4,096 numbers."""
        size = sum(self.sizes)
        epochs, positions = np.divmod(numbers, size)
        index = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = derive(self.seed, _PURPOSE, int(epoch))
            index[here] = Permutation(size, key)(positions[here])
        ends = np.cumsum(np.asarray(self.sizes, dtype=np.int64))
        which = np.searchsorted(ends, index, side="right").astype(np.int64)
        return which, index - (ends - np.asarray(self.sizes, dtype=np.int64))[which]
