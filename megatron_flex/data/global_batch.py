"""A global batch as the index knows it: lengths, before any token is read."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flex.data.keyed import IntArray


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The samples of one iteration.

    Attributes:
        first_sample: consumed-sample number of the first; the others follow it.
        lengths: input tokens of each sample, ``[n]`` int64, read-only.
        denominators: number of targets of the whole batch, one entry a loss: ``(lm,)``, or
            ``(lm, sentence order)``. Losses are divided by them at their source.
    """

    first_sample: int
    lengths: IntArray
    denominators: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Number of input tokens."""
        return int(self.lengths.sum())
