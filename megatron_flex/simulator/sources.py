"""Where the lengths of simulated batches come from: a value for each batch number, always the same.

A batch is known by its number alone, so a simulation can go on anywhere, and look ahead.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_flex.data.errors import DataError
from megatron_flex.data.keyed import IntArray
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.data.mock import LONGEST, mixture_lengths
from megatron_flex.data.order import EpochOrder
from megatron_flex.planner.thin import part

Lengths = tuple[int, ...]
LARGEST = 2**31
"""Tokens of a sample; it is cut off far earlier."""
LONG_SIGMA = 0.7
"""Standard deviation of the logarithm of long samples."""


class Source(Protocol):
    """Numbered global batches."""

    def batch(self, number: int) -> Lengths:
        """Tokens of the samples of batch ``number``, from 0."""


@dataclass(frozen=True)
class Mixture:
    """The published FLANv2 lengths (``data/mock.py``), and perhaps a share of long samples.

    Attributes:
        samples: of a batch.
        longest: longer samples are cut off there.
        share: of the samples that are long.
        median: tokens of long ones (lognormal, sigma :data:`LONG_SIGMA`).
    """

    samples: int
    seed: int = 1234
    longest: int = LONGEST
    share: float = 0.0
    median: int = 16000

    def __post_init__(self) -> None:
        if self.samples < 1 or self.longest < 1 or self.median < 1:
            raise DataError("samples, the longest of them and the median must be at least 1")
        if not 0.0 <= self.share <= 1.0:
            raise DataError(f"the share of long samples is between 0 and 1, not {self.share}")

    def batch(self, number: int) -> Lengths:
        """See :class:`Source`."""
        first = number * self.samples
        found = mixture_lengths(self.seed, np.arange(first, first + self.samples))
        if self.share:
            draw = np.random.default_rng((self.seed, number))
            long = draw.lognormal(math.log(self.median), LONG_SIGMA, self.samples)
            found = np.where(draw.random(self.samples) < self.share, long.astype(np.int64), found)
        return tuple(np.clip(found, 1, self.longest).tolist())


@dataclass(frozen=True, eq=False)
class Listed:
    """Given samples, shuffled anew in each epoch as in training.

    Attributes:
        lengths: ``[n]`` tokens of every sample.
    """

    lengths: IntArray
    samples: int
    seed: int = 1234
    longest: int = LONGEST

    def __post_init__(self) -> None:
        if len(self.lengths) == 0 or int(self.lengths.min()) < 1:
            raise DataError("a source needs samples, each of at least 1 token")
        if self.samples < 1 or self.longest < 1:
            raise DataError("samples and the longest of them must be at least 1")

    @cached_property
    def _order(self) -> EpochOrder:
        return EpochOrder((len(self.lengths),), self.seed)

    def batch(self, number: int) -> Lengths:
        """See :class:`Source`."""
        first = number * self.samples
        _, index = self._order.locate(np.arange(first, first + self.samples, dtype=np.int64))
        return tuple(np.minimum(self.lengths[index], self.longest).tolist())


@dataclass(frozen=True)
class Given:
    """Given batches, one after the other; after the last the first comes again."""

    batches: tuple[Lengths, ...]
    longest: int = LONGEST

    def batch(self, number: int) -> Lengths:
        """See :class:`Source`."""
        return tuple(min(n, self.longest) for n in self.batches[number % len(self.batches)])


@dataclass(frozen=True)
class Part:
    """What falls to the devices that stand for all of a large cluster (``planner/thin.py``).

    Attributes:
        width: devices that each of them stands for.
        cost: what samples cost.
        devices: how many there are of them.
    """

    source: Source
    width: int
    cost: CostCoefficients
    devices: int

    def batch(self, number: int) -> Lengths:
        """See :class:`Source`."""
        return part(self.source.batch(number), self.width, self.cost, self.devices)


def whole(source: Source, number: int) -> Lengths:
    """All samples of a batch, where the source has only a part of them, too."""
    return (source.source if isinstance(source, Part) else source).batch(number)


def read_batches(path: Path) -> tuple[Lengths, ...]:
    """Batches from a file with one a line: the lengths of its samples, separated by spaces.

    Blank lines and lines that begin with # are skipped.

    Raises:
        DataError: unreadable, or a length is not a number above 0; the message names the line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if not all(_number(word) and int(word) > 0 for word in words):
            raise DataError(f"{path}, line {number}: expected lengths of at least 1: {line!r}")
        found.append(tuple(map(int, words)))
    if not found:
        raise DataError(f"{path} has no batches")
    return tuple(found)


def read_csv(path: Path) -> IntArray:
    """Lengths from a file with one a line, or from the column ``length`` of a CSV.

    Raises:
        DataError: unreadable, or a line is not a number; the message names it.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as stream:  # spreadsheets write the mark
            reader = csv.reader(stream)
            rows = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    column = 0
    if rows and not _number(rows[0][1][0]):
        names = [word.strip() for word in rows[0][1]]
        if "length" in names:
            column = names.index("length")
        elif len(names) > 1:
            raise DataError(f"{path}, line 1: none of its columns is named length: {names}")
        rows = rows[1:]
    found = []
    for number, words in rows:
        if len(words) <= column or not _number(words[column]):
            raise DataError(f"{path}, line {number}: expected a whole number: {','.join(words)!r}")
        found.append(int(words[column]))
    if not found:
        raise DataError(f"{path} has no lengths")
    return np.minimum(found, LARGEST).astype(np.int64)


def _number(word: str) -> bool:
    return word.strip().isdecimal()


def extremes(
    source: Source, iterations: int, of: Callable[[Lengths], float], most: int
) -> list[int]:
    """Numbers of the batches of which ``of`` is largest, largest first."""
    ranked = sorted(range(iterations), key=lambda k: (-of(source.batch(k)), k))
    return ranked[:most]
