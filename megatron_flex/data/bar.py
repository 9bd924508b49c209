"""Progress bars that also say something where nobody watches a terminal."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

INTERVAL = 10.0
"""Seconds between lines where the output is no terminal."""


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


def progress_bar(total: float, description: str, *, unit: str = "", position: int = 0) -> Any:
    """A ``tqdm`` bar on a terminal, else a line every ten seconds."""
    if sys.stderr.isatty():
        return tqdm(total=total, desc=description, unit=unit, unit_scale=unit == "B",
                    position=position, mininterval=0.5)  # fmt: skip
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
        bar_format="{desc}: {percentage:3.0f}% of {total_fmt}{unit}, {elapsed} gone,"
        " {remaining} left{postfix}",
    )
