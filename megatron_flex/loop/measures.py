"""What the devices' own times say about an iteration: bubble, and the stall of a switch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from megatron_flex.runtime.clock import Measured

_KEPT = 50  # gaps without a switch that the usual gap is the median of


def bubble(measured: Sequence[Measured]) -> float:
    """Share of the time until the global norm in which a device that computes did not compute."""
    working = [m for m in measured if m.busy > 0.0]
    if not working:
        return 0.0
    elapsed = max(m.elapsed for m in working)
    return max(0.0, 1.0 - sum(m.busy for m in working) / (len(working) * elapsed))


class StallMeter:
    """How much longer than usual a switch keeps devices from computing.

    The gap of a device runs from its last update to its first operation of the next iteration. The
    stall of a switch is the longest gap of a device after it, less the usual one without a switch.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_KEPT)

    def add(self, measured: Sequence[Measured], *, switched: bool) -> float | None:
        """Seconds of stall before this iteration if the one before it switched, else ``None``."""
        gap = max((m.gap for m in measured if m.busy > 0.0), default=0.0)
        if not switched:
            if gap > 0.0:
                self._usual.append(gap)
            return None
        return max(0.0, gap - (median(self._usual) if self._usual else 0.0))
