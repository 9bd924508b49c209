"""What a set of training samples is, and which documents can be samples at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_flex.data.errors import DataError
from megatron_flex.data.keyed import IntArray

_PIECE = 1 << 22  # documents looked at a time: bounds scratch memory
WORTH_A_WARNING = 0.01
"""Share of tokens lost from which on a run warns of it."""


class Overlong(str, Enum):
    """What to do with a sample longer than ``--max-sample-length``."""

    TRUNCATE = "truncate"
    SPLIT = "split"
    DROP = "drop"
    ERROR = "error"


@dataclass(frozen=True)
class Row:
    """The tokens of one slice of one sample, ``[n]`` each; ``None`` where not asked for.

    ``loss_mask`` is float32, the others int64. ``sentence_order`` is 0 (in order) or 1 (swapped).
    """

    tokens: IntArray | None = None
    labels: IntArray | None = None
    loss_mask: npt.NDArray[np.float32] | None = None
    token_types: IntArray | None = None
    sentence_order: int | None = None


class Samples(Protocol):
    """A finite set of samples of one kind, addressed by index. Lengths need no tokens."""

    @property
    def selection(self) -> Selection:
        """Which documents are samples, and what was left out."""

    @property
    def num_losses(self) -> int:
        """Number of losses with a denominator of their own: 1, or 2 with a sentence-order head."""

    def lengths(self, index: IntArray) -> IntArray:
        """Input tokens of each sample, ``[n]`` int64."""

    def loss_tokens(self, index: IntArray) -> IntArray:
        """Targets of each sample for each loss, ``[n, num_losses]`` int64."""

    def read(
        self, index: int, number: int, start: int, stop: int, *, inputs: bool, targets: bool
    ) -> Row:
        """Tokens ``[start, stop)`` of a sample; ``number`` is its consumed-sample number."""


@dataclass(frozen=True)
class Counts:
    """What became of the documents of a set.

    ``no_target`` were too short to give a target (or have one sentence only where two are needed),
    ``dropped`` too long, or without a target up to the limit.
    ``cut_tokens`` is the number of tokens that truncation removed, ``dropped_tokens`` that of the
    documents that were dropped or whose targets all lie beyond the limit, ``tokens`` that of all
    documents, before either, without those too short for a target.
    ``divided`` documents became several samples each; ``dividable``: those of this kind can.
    """

    documents: int
    samples: int
    no_target: int
    truncated: int
    cut_tokens: int
    dropped: int
    dropped_tokens: int = 0
    divided: int = 0
    tokens: int = 0
    dividable: bool = True

    @property
    def lost(self) -> float:
        """Share of the tokens that no sample has."""
        return (self.cut_tokens + self.dropped_tokens) / max(1, self.tokens)

    def warning(self, max_length: int) -> str | None:
        """A sentence if ``--max-sample-length`` costs 1 % of the tokens or more."""
        if self.lost < WORTH_A_WARNING:
            return None
        lost = self.cut_tokens + self.dropped_tokens
        advice = ", or make several samples of a document with --overlong split"
        return (
            f"{100 * self.lost:.1f} % of the tokens ({lost} of {self.tokens}) are left out:"
            f" samples are longer than --max-sample-length (or else --seq-length) {max_length}:"
            f" raise it{advice if self.dividable and not self.divided else ''}"
        )

    def __str__(self) -> str:
        parts = [f"{self.samples} samples of {self.documents} documents"]
        if self.no_target:
            parts.append(f"{self.no_target} skipped without a target")
        if self.truncated:
            parts.append(f"{self.truncated} truncated by {self.cut_tokens} tokens in all")
        if self.dropped:
            parts.append(f"{self.dropped} dropped as too long")
        if self.lost:
            parts.append(f"{100 * self.lost:.2g} % of the tokens lost")
        if self.divided:
            parts.append(f"{self.divided} divided into several")
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class Selection:
    """The usable documents of ``[start, stop)``; ``kept`` is ``None`` when all of them are.

    Where long documents are divided, ``ends`` has for each document of ``[start, stop)`` the
    number of samples up to its own last, and ``kept`` plays no part.
    """

    start: int
    kept: npt.NDArray[np.integer] | None
    counts: Counts
    ends: IntArray | None = None

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.counts.samples

    def documents(self, index: IntArray) -> IntArray:
        """Document number of each sample index, ``[n]`` int64."""
        if self.ends is not None:
            return np.searchsorted(self.ends, index, side="right") + self.start
        if self.kept is None:
            return index + self.start
        return self.kept[index].astype(np.int64) + self.start

    def parts(self, index: IntArray) -> IntArray:
        """Which part of its document each sample is, from 0, ``[n]`` int64."""
        if self.ends is None:
            return np.zeros_like(index)
        document = np.searchsorted(self.ends, index, side="right")
        return index - np.where(document > 0, self.ends[document - 1], 0)


def select(
    name: str,
    start: int,
    stop: int,
    measure: Callable[[IntArray], tuple[IntArray, IntArray]],
    max_length: int | None,
    overlong: Overlong,
    *,
    divide: Callable[[IntArray], tuple[IntArray, IntArray]] | None,
    may_lose_targets: bool = False,
    remaining: Callable[[IntArray], IntArray] | None = None,
) -> Selection:
    """Find the documents of ``[start, stop)`` that can be samples.

    Args:
        name: the data set, for messages.
        measure: for document numbers, the input tokens of the *uncut* sample, and the targets of
            the sample as it would be used (cut to ``max_length``); no target, no sample.
        max_length: most input tokens of a sample; ``None`` for no limit.
        overlong: what to do with longer ones.
        divide: for document numbers of which each is too long, the samples that each becomes with
            ``Overlong.SPLIT``, and the input tokens that none of them has; ``None``: they cannot.
        may_lose_targets: whether a sample can have targets that all lie beyond ``max_length``.
        remaining: for document numbers of which each is truncated, the input tokens that it keeps;
            ``None``: ``max_length`` of each.

    Raises:
        DataError: a sample is too long and ``overlong`` is ``error``, or none is left.
    """
    usable = np.empty(stop - start, dtype=bool)
    splits = overlong is Overlong.SPLIT and max_length is not None and divide is not None
    samples = np.empty(stop - start if splits else 0, dtype=np.int64)
    no_target = truncated = cut = dropped = dropped_tokens = divided = tokens = 0
    for first in range(start, stop, _PIECE):
        numbers = np.arange(first, min(first + _PIECE, stop), dtype=np.int64)
        lengths, targets = measure(numbers)
        useful = targets > 0
        over = np.zeros_like(useful) if max_length is None else useful & (lengths > max_length)
        if overlong is Overlong.ERROR and over.any():
            worst = int(np.argmax(np.where(over, lengths, 0)))
            raise DataError(
                f"data set '{name}': document {int(numbers[worst])} has {int(lengths[worst])} input"
                f" tokens, more than --max-sample-length {max_length}; raise it, or choose"
                " --overlong truncate, split or drop"
            )
        no_target += int(np.count_nonzero(~useful))
        tokens += int(lengths[useful].sum())
        if may_lose_targets and max_length is not None:
            late = ~useful & (lengths > max_length)
            lost = int(lengths[late].sum())
            tokens, dropped_tokens = tokens + lost, dropped_tokens + lost
            no_target -= int(np.count_nonzero(late))
            dropped += int(np.count_nonzero(late))
        if splits:
            divided += int(np.count_nonzero(over))
            pieces = useful.astype(np.int64)
            if over.any() and divide is not None:
                pieces[over], without = divide(numbers[over])
                dropped_tokens += int(without.sum())
            samples[first - start : first - start + len(numbers)] = pieces
        elif overlong is Overlong.DROP:
            dropped += int(np.count_nonzero(over))
            dropped_tokens += int(lengths[over].sum())
            useful &= ~over
        elif max_length is not None:
            truncated += int(np.count_nonzero(over))
            left = max_length if remaining is None else remaining(numbers[over])
            cut += int((lengths[over] - left).sum())
        usable[first - start : first - start + len(numbers)] = useful
    size = int(samples.sum() if splits else np.count_nonzero(usable))
    counts = Counts(
        stop - start, size, no_target, truncated, cut, dropped, dropped_tokens, divided, tokens,
        dividable=divide is not None,
    )  # fmt: skip
    if size == 0:
        raise DataError(
            f"data set '{name}': none of its {stop - start} documents can be a sample ({no_target}"
            f" without a target, {dropped} longer than --max-sample-length {max_length}); check"
            " --split, --max-sample-length and the data"
        )
    if splits:
        return Selection(start, None, counts, np.cumsum(samples))
    kept: npt.NDArray[np.integer] | None = None
    if size < stop - start:
        kept = np.flatnonzero(usable)
        if stop - start < 1 << 31:
            kept = kept.astype(np.int32)  # half the memory, on every process
    return Selection(start, kept, counts)
