"""The micro-batch: which tokens of which samples go through the pipeline together.

Values only (no torch, no numpy): the planner, the schedule and the workers share them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens ``[start, stop)`` of one sample.

    ``sample`` is the consumed-sample number: its place in the training order, counted from the
    beginning of the run. It keys dropout, so it must not depend on packing or placement.
    ``length`` is the number of tokens of the whole sample.
    """

    sample: int
    start: int
    stop: int
    length: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.length or self.sample < 0:
            raise ValueError(f"not a slice of a sample: {self}")

    @classmethod
    def all_of(cls, sample: int, length: int) -> Slice:
        """A whole sample."""
        return cls(sample, 0, length, length)

    @property
    def whole(self) -> bool:
        """Whether it is the whole sample."""
        return self.stop - self.start == self.length

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Slices packed one after the other, without padding.

    With ``padded`` they are whole samples, each computed as so many tokens. Otherwise ``tail``
    tokens of padding may follow, which are computed as one more sample: see :meth:`aligned`.
    """

    slices: tuple[Slice, ...]
    padded: int = 0
    tail: int = 0

    def __post_init__(self) -> None:
        if not self.slices:
            raise ValueError("a micro-batch needs at least one slice")
        if self.tail < 0 or (self.tail and self.padded):
            raise ValueError(f"padding is behind each sample or behind all of them: {self}")
        if self.padded and any(not s.whole or s.tokens > self.padded for s in self.slices):
            raise ValueError(f"whole samples of at most {self.padded} tokens are padded to that")

    @property
    def tokens(self) -> int:
        """Number of tokens: the first dimension of every activation of this micro-batch."""
        if self.padded:
            return self.padded * len(self.slices)
        return sum(s.tokens for s in self.slices) + self.tail

    @property
    def sliced(self) -> int:
        """Tokens of its slice of a longer sample, which is its first; 0: all are whole."""
        first = self.slices[0]
        return 0 if first.whole else first.tokens

    @property
    def squares(self) -> int:
        """Attention work in token pairs: for each slice, ``stop**2 - start**2``.

        For whole samples this is the sum of the squared lengths. A slice attends to all earlier
        tokens of its sample, hence the difference of squares; a causal mask halves both alike.
        """
        if self.padded:
            return self.padded * self.padded * len(self.slices)
        own = sum(s.stop * s.stop - s.start * s.start for s in self.slices)
        return own + self.tail * self.tail

    def aligned(self, multiple: int) -> MicroBatch:
        """The same with as much padding as makes its tokens a multiple, as fp8 kernels want it.

        Padding goes behind all slices; where samples are padded anyway, behind each of them.
        """
        if self.padded:
            return replace(self, padded=-(-self.padded // multiple) * multiple)
        return replace(self, tail=self.tail + -self.tokens % multiple)
