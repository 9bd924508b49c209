"""The lengths of the samples of future iterations, from the index: no token is read."""

from __future__ import annotations

from collections.abc import Callable

from megatron_flex.data.batches import BatchSource


class Lengths:
    """Of one run's training batches, from the iteration ``first`` on.

    Args:
        first: an iteration, from 0.
        samples: samples that come before it.
        size: the batch size after so many samples.
    """

    def __init__(
        self, source: BatchSource, first: int, samples: int, size: Callable[[int], int]
    ) -> None:
        self._source = source
        self._first = first
        self._starts = [samples]
        self._size = size

    def of(self, iteration: int) -> tuple[int, ...]:
        """Lengths of the samples of an iteration's batch."""
        starts = self._starts
        while len(starts) <= iteration - self._first:
            starts.append(starts[-1] + self._size(starts[-1]))
        first = starts[iteration - self._first]
        batch = self._source.batch(first, self._size(first))
        return tuple(batch.lengths.tolist())
