"""Micro-batches with padding, as trainers without variable-length attention make them.

A micro-batch of n samples padded to L tokens computes n * L tokens and n * L**2 token pairs,
whatever its samples are: here it is only these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_flex.planner.build import Batch


@dataclass(frozen=True)
class Padded:
    """``count`` samples, each computed as ``length`` tokens."""

    count: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return self.count * self.length

    @property
    def squares(self) -> int:
        """Token pairs that are computed."""
        return self.count * self.length * self.length


def batch_of_padded(micro_batches: Sequence[Padded]) -> Batch:
    """The numbers that the planner and the simulator know a batch by."""
    return Batch(
        np.array([m.tokens for m in micro_batches], dtype=np.float64),
        np.array([m.squares for m in micro_batches], dtype=np.float64),
    )


def by_count(lengths: Sequence[int], size: int, length: int = 0) -> tuple[Padded, ...]:
    """``--micro-batch-size`` samples each, in their order, all padded alike.

    Args:
        length: what to pad to (``--seq-length``); 0: the longest of the batch.
    """
    longest = max(length, max(lengths))
    whole, rest = divmod(len(lengths), size)
    return (Padded(size, longest),) * whole + ((Padded(rest, longest),) if rest else ())


def by_bucket(lengths: Sequence[int], budget: int) -> tuple[Padded, ...]:
    """Samples of like length together: sorted, and cut where ``budget`` computed tokens are full.

    A sample longer than the budget is alone. Short micro-batches first.
    """
    found: list[Padded] = []
    count = longest = 0
    for length in sorted(lengths):
        if count and (count + 1) * length > budget:
            found.append(Padded(count, longest))
            count = 0
        count, longest = count + 1, length
    return (*found, Padded(count, longest))
