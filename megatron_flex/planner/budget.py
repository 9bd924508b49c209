"""The smallest memory budget with which a refused batch would fit: found by trying.

What a plan may fill is the budget without a margin (:mod:`limits`), and which plan lacks least
changes with the budget. So budgets are tried on the planner itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

DIGITS = 3
"""Significant digits of the answer: it is at most 1 % above the smallest."""
SECONDS = 20.0
"""Of this process, in which budgets are tried; what is found by then is good, but perhaps not the
smallest."""
_GROWTH = 1.25
_LARGEST = 1e4


def smallest_budget(
    fits: Callable[[int], bool], refused: float, shortfall: float, seconds: float = SECONDS
) -> int | None:
    """Bytes of the smallest budget that fits, of :data:`DIGITS` digits; it has been tried.

    Args:
        fits: whether a budget of so many bytes does.
        refused: a budget that does not.
        shortfall: a guess at what it lacks.
        seconds: of processor time, after which nothing is tried any more.

    Returns:
        ``None`` if none was found in that time, or none below ten thousand times ``refused``.
    """
    end = time.process_time() + seconds
    low, high = refused, refused + max(shortfall, 0.01 * refused)
    step = _step(high)
    while not fits(math.ceil(high / step) * step):
        if high > _LARGEST * refused or time.process_time() > end:
            return None
        low, high = high, high * _GROWTH
        step = _step(high)
    below, found = math.floor(low / step), math.ceil(high / step)
    while found - below > 1 and time.process_time() < end:
        middle = (below + found) // 2
        if fits(middle * step):
            found = middle
        else:
            below = middle
    return found * step


def _step(size: float) -> int:
    return int(10 ** max(0, math.floor(math.log10(size)) + 1 - DIGITS))


def budget_advice(size: int, flag: str, reserved: int) -> str:
    """A sentence's end that names ``flag`` with a budget of ``size`` bytes.

    ``reserved``: bytes of a device that the cluster's description keeps from training.
    """
    text = f"; the smallest budget that would do is {_text(size)} ({flag} {size / 1e9:.12g})"
    return f"{text}, on devices of {_text(size + reserved)} with the reserve" if reserved else text


def _text(size: int) -> str:
    return f"{size / 1e9:.6g} GB" if size >= 1e9 else f"{size / 1e6:.6g} MB"
