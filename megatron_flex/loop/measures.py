"""What the devices' own figures say of an iteration: bubble, times, memory, stall of a switch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.runtime.clock import Measured
from megatron_flex.telemetry.record import LENGTH_PERCENTILES, LENGTHS_LISTED

_KEPT = 50  # gaps without a switch that the usual gap is the median of
_TOLD_APART = ("receive", "send", "reduce", "state", "update", "reading")


def bubble(measured: Sequence[Measured]) -> float:
    """Share of the time until the global norm in which a device that computes did not compute."""
    working = [m for m in measured if m.busy > 0.0]
    if not working:
        return 0.0
    elapsed = max(m.elapsed for m in working)
    return max(0.0, 1.0 - sum(m.busy for m in working) / (len(working) * elapsed))


def times_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Where the time of an iteration went, in seconds: means over the devices that compute.

    ``seconds-to-norm`` is the time from the beginning to the meeting at the global norm, the same
    for all, and ``seconds-norm`` the wait for the last one there; ``seconds-update`` is of the
    iteration before, ``seconds-reading`` mostly before the beginning. ``seconds-balanced`` is what
    the computing would take if it were spread evenly over all devices with nothing in between.
    What hosts of GPUs cannot tell is left out.
    """
    working = [m for m in measured if m.busy > 0.0]
    if not working:
        return {}
    elapsed = max(m.elapsed for m in working)
    found = {
        "seconds-to-norm": elapsed,
        "seconds-compute": fmean(m.busy for m in working),
        "seconds-balanced": sum(m.busy for m in working) / len(measured),
        "seconds-norm": fmean(elapsed - m.elapsed for m in working),
    }
    apart = {n: fmean(getattr(m, n) for m in working) for n in _TOLD_APART}
    if any(apart.values()):
        found |= {f"seconds-{name}": seconds for name, seconds in apart.items()}
    return found


def lists_of(batch: GlobalBatch, measured: Sequence[Measured]) -> dict[str, list[int]]:
    """Figures of every sample and of every device, for the JSONL file."""
    lengths = batch.lengths
    percentiles = np.percentile(lengths, LENGTH_PERCENTILES)
    found = {"length-quantiles": percentiles.round().astype(int).tolist()}
    if len(lengths) <= LENGTHS_LISTED:
        found["lengths"] = lengths.tolist()
    if any(m.memory > 0.0 for m in measured):
        found["memory-by-worker"] = [round(m.memory) for m in measured]
        found["memory-predicted-by-worker"] = [round(m.predicted) for m in measured]
    return found


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


def memory_ratio(measured: Sequence[Measured]) -> float:
    """The largest ratio of measured to predicted memory of a device; 0 where there is none.

    Only devices that use at least half of what the fullest does: the others are far from a limit.
    """
    most = max((m.memory for m in measured), default=0.0)
    full = (m for m in measured if m.predicted > 0.0 and 2.0 * m.memory >= most)
    return max((m.memory / m.predicted for m in full), default=0.0)


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
