"""``--data-path`` and its relatives: lists of prefixes with or without weights, and ``--split``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from megatron_flex.data.errors import DataError

LEGACY_SPLIT = "969, 30, 1"
"""Megatron's value where ``--split`` is not given."""


class Split(IntEnum):
    """The three uses of data."""

    TRAIN = 0
    VALID = 1
    TEST = 2


@dataclass(frozen=True)
class Blend:
    """Prefixes to mix; ``weights`` is ``None`` to mix by size (each sample once an epoch)."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> Blend:
    """Read ``prefix``, ``prefix1 prefix2 …`` or ``weight1 prefix1 weight2 prefix2 …``.

    As ``megatron.core.datasets.utils.get_blend_from_list``: an even number of words is weights and
    prefixes if every first word of a pair is a number, and prefixes if none is. A list with some
    numbers is an error.
    """
    if not words:
        raise DataError(f"{flag} needs at least one data set prefix")
    if len(words) % 2 == 0:
        numbers = [_is_number(word) for word in words[::2]]
        if all(numbers):
            weights = [_proportion(word, f"{flag}: weight") for word in words[::2]]
            if not 0 < sum(weights) < math.inf:
                raise DataError(f"{flag}: the sum of the weights must be finite and above zero")
            pairs = [(w, p.strip()) for w, p in zip(weights, words[1::2], strict=True) if w > 0]
            return Blend(tuple(p for _, p in pairs), tuple(w for w, _ in pairs))
        if any(numbers):
            wrong = words[2 * numbers.index(False)]
            raise DataError(
                f"{flag}: either each prefix has a weight before it, or none has; '{wrong}' is no"
                " weight"
            )
    return Blend(tuple(word.strip() for word in words))


_NUMBER = re.compile(
    r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?nan|[+-]?inf(inity)?", re.IGNORECASE
)


def _is_number(word: str) -> bool:
    """Whether a word is a number as a whole; also one that cannot be a weight."""
    return _NUMBER.fullmatch(word.strip()) is not None


def _proportion(word: str, what: str) -> float:
    """A field that is a finite number, not negative; ``what`` names it in the error."""
    value = float(word) if _is_number(word) else math.nan
    if not (math.isfinite(value) and value >= 0):
        raise DataError(f"{what} '{word.strip()}' is not a finite number that is 0 or more")
    return value


def split_bounds(split: str, count: int) -> tuple[tuple[int, int], ...]:
    """First and one-after-last document of train, valid and test for ``--split``.

    As megatron-core (``parse_and_normalize_split``): up to three proportions of any scale, in
    order, borders rounded to the nearest document. ``split_bounds("98,2,0", 1000)`` is
    ``((0, 980), (980, 1000), (1000, 1000))``. Other than there, a field is read whole or refused.

    Raises:
        DataError: a field is not a finite number that is 0 or more, or there are too many.
    """
    shares = [_proportion(word, f"--split {split}: field") for word in split.split(",")]
    if len(shares) > 3 or not 0 < sum(shares) < math.inf:
        raise DataError(
            f"--split takes up to three proportions such as 969,30,1, not all zero; not '{split}'"
        )
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    borders = [0]
    seen = 0.0
    for share in shares:
        seen += share / total
        borders.append(min(count, round(seen * count)))
    return tuple(pairwise(borders))
