"""Progress bars that also say something where nobody watches a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")

INTERVAL = 10.0
"""Seconds between lines where the output is no terminal."""
SHORT = 2.0
"""Seconds that a tool may take without a word."""


class _Lines:
    """A stream for tqdm that gets a line for each state of the bar, not one line redrawn."""

    def __init__(self) -> None:
        self._last = ""

    def write(self, text: str) -> int:
        """Print the bar's state, if it is another."""
        state = text.strip()
        if state and state != self._last:
            print(state, file=sys.stderr, flush=True)
            self._last = state
        return len(text)

    def flush(self) -> None:
        """All is out."""


def progress_bar(
    total: float, description: str, *, unit: str = "", position: int = 0, delay: float = 0.0
) -> Any:
    """A ``tqdm`` bar on a terminal, else a line every ten seconds.

    What takes less than ``delay`` seconds says nothing.
    """
    if sys.stderr.isatty():
        return tqdm(total=total, desc=description, unit=unit, unit_scale=unit == "B",
                    position=position, mininterval=0.5, delay=delay)  # fmt: skip
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=unit == "B",
        file=_Lines(),
        ascii=True,
        mininterval=INTERVAL,
        maxinterval=INTERVAL,
        miniters=1,
        delay=delay,
        bar_format="{desc}: {percentage:3.0f}% of {total_fmt}{unit}, {elapsed} gone,"
        " {remaining} left{postfix}",
    )


def shown(items: Sequence[Item], description: str, *, unit: str = "") -> Iterator[Item]:
    """The items, with a bar if going through them takes more than :data:`SHORT` seconds."""
    with progress_bar(len(items), description, unit=unit, delay=SHORT) as bar:
        for item in items:
            yield item
            bar.update(1)
