"""What the devices' own figures say of an iteration: bubble, memory, and the stall of a switch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.runtime.clock import Measured

_KEPT = 50  # gaps without a switch that the usual gap is the median of


def bubble(measured: Sequence[Measured]) -> float:
    """Share of the time until the global norm in which a device that computes did not compute."""
    working = [m for m in measured if m.busy > 0.0]
    if not working:
        return 0.0
    elapsed = max(m.elapsed for m in working)
    return max(0.0, 1.0 - sum(m.busy for m in working) / (len(working) * elapsed))


def cut_of(micro_batches: Sequence[MicroBatch]) -> tuple[dict[str, float], dict[str, str]]:
    """Numbers and log fields on how a batch was cut."""
    pieces = [m.slices[0].sample for m in micro_batches if m.sliced]
    samples = len(set(pieces))
    numbers = {
        "micro-batches": float(len(micro_batches)),
        "sliced-samples": float(samples),
        "slices": float(len(pieces)),
    }
    return numbers, {"sliced": f"{samples} in {len(pieces)}"} if pieces else {}


class MemoryMeasure:
    """Peak memory of the fullest device against its prediction and the budget.

    Attributes:
        over: iterations so far in which a device used more than the budget.
    """

    def __init__(self, budget: float | None) -> None:
        self._budget = budget
        self.over = 0

    def add(self, measured: Sequence[Measured]) -> dict[str, float]:
        """Numbers of an iteration, in bytes; nothing where memory is not counted.

        ``memory-over-budget`` counts its devices that used more than the budget.
        """
        counted = [m for m in measured if m.memory > 0.0]
        if not counted:
            return {}
        found = {
            "memory-measured": max(m.memory for m in counted),
            "memory-predicted": max(m.predicted for m in counted),
        }
        if self._budget is not None:
            over = sum(m.memory > self._budget for m in counted)
            found["memory-over-budget"] = float(over)
            self.over += over > 0
        return found


def memory_ratio(measured: Sequence[Measured], room: float = 0.0) -> float:
    """The largest ratio of measured to predicted memory of a device; 0 where there is none.

    Only devices that use at least half of what the fullest does: the others are far from a limit.

    Args:
        room: bytes for which plans leave room beside what they predict; they explain themselves.
    """
    most = max((m.memory for m in measured), default=0.0)
    full = (m for m in measured if m.predicted > 0.0 and 2.0 * m.memory >= most)
    return max(
        (max(m.memory - room, min(m.memory, m.predicted)) / m.predicted for m in full), default=0.0
    )


class StallMeter:
    """How much longer than usual a switch keeps devices from computing.

    The gap of a device runs from its last update to its first operation of the next iteration,
    without the wait for other stages (:class:`Measured`). The stall of a switch is the longest gap
    of a device after it, less the usual one without a switch.
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
