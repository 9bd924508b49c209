"""How many simulations a decision may take: as many as fit into a part of an iteration's time."""

from __future__ import annotations

PART, LARGE_PART = 0.3, 0.1
"""Of an iteration, for the decision that is made meanwhile; the second where one device stands for
several: iterations on large clusters are long."""
CROWDED_PART = 0.03
"""The same where the workers leave no core free: what is planned then, is not trained."""
LEAST, MOST = 4, 1000
"""Bounds of the number."""
START = 500.0
"""Simulations a second, before any were timed."""
WEIGHT = 0.2
"""Of the latest decision, in the rate; the first one is all that is known."""


def part_of(width: int, part: float = PART) -> float:
    """The part where each device of a plan stands for ``width``; ``part``: where it is one."""
    return min(part, LARGE_PART) if width > 1 else part


class Pace:
    """Measures how long decisions take: what comes before any simulation, and one of these.

    What it says depends on clocks. So the number that a decision took is recorded with it, and a
    decision is repeated with that.
    """

    def __init__(self, part: float = PART) -> None:
        self.part = part
        self.rate = START
        self.before = 0.0
        self._weight = 1.0

    def took(self, simulations: int, seconds: float, before: float = 0.0) -> None:
        """A decision took so many simulations, ``seconds`` in all, ``before`` them."""
        if simulations > 1 and seconds > before:
            self.rate += self._weight * (simulations / (seconds - before) - self.rate)
            self.before += self._weight * (before - self.before)
            self._weight = WEIGHT

    def simulations(self, iteration: float) -> int:
        """How many fit into the part of an iteration of so many seconds."""
        room = self.part * iteration - self.before
        return round(min(max(room * self.rate, LEAST), MOST))
