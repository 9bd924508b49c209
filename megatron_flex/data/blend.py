"""Mixing several sets of samples by weight, with random access and without stored indices.

Megatron draws greedily from the set that lags most behind its weight, one sample after the other
(``build_blending_indices``). Here the j-th sample of a set with weight w is due at time
``(j + 1/2) / w`` (Sainte-Laguë's rule) and samples are taken in the order of these times: counts
follow the weights as closely, and any range of the order can be computed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_flex.data.errors import DataError
from megatron_flex.data.keyed import IntArray, derive
from megatron_flex.data.order import EpochOrder

_PURPOSE = 4  # keeps this use of the seed apart from all others
_BLOCK = 4096  # consumed-sample numbers computed at a time


@dataclass(frozen=True)
class BlendOrder:
    """An endless mixture; each set goes through its own shuffled epochs.

    Args:
        sizes: samples of each set.
        weights: share of each set, any positive scale.
        seed: ``--seed``.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    num_samples: None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.weights):
            raise DataError("a blend needs one weight for each data set")
        if not all(0 < w < float("inf") for w in self.weights):
            raise DataError(f"blend weights must be positive numbers, not {self.weights}")

    def locate(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """See :class:`megatron_flex.data.order.Order`."""
        which, turn = np.empty_like(numbers), np.empty_like(numbers)
        blocks = numbers // _BLOCK
        for block in np.unique(blocks):
            here = blocks == block
            first = int(block) * _BLOCK
            sets, turns = self._range(first, first + _BLOCK)
            which[here] = sets[numbers[here] - first]
            turn[here] = turns[numbers[here] - first]
        index = np.empty_like(turn)
        for number in np.unique(which):
            here = which == number
            seed = derive(self.seed, _PURPOSE, int(number))
            index[here] = EpochOrder((self.sizes[number],), seed).locate(turn[here])[1]
        return which, index

    def _range(self, first: int, stop: int) -> tuple[IntArray, IntArray]:
        """Set and turn within the set of samples ``[first, stop)``.

        The sample with rank n is due within ``len(weights)`` of time n, because each set is
        within one sample of its share at any time. So candidates from a little wider a range are
        sorted by due time, and the rank of the first is a sum of counts.
        """
        shares = np.array(self.weights) / sum(self.weights)
        margin = len(shares) + 1
        begin, end = first - margin, stop + margin
        all_sets, all_turns, all_due = [], [], []
        rank = 0  # samples due before ``begin``
        for number, share in enumerate(shares):
            low = max(0, int(begin * share - 1))
            turns = np.arange(low, int(end * share + 1) + 1, dtype=np.int64)
            due = (turns + 0.5) / share
            before = int(np.searchsorted(due, begin))
            rank += low + before
            all_turns.append(turns[before:])
            all_due.append(due[before:])
            all_sets.append(np.full(len(turns) - before, number, dtype=np.int64))
        sets, turn = np.concatenate(all_sets), np.concatenate(all_turns)
        chosen = np.lexsort((sets, np.concatenate(all_due)))[first - rank : stop - rank]
        return sets[chosen], turn[chosen]
