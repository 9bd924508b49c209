"""Averages over the iterations between two log lines (Megatron's ``training_log``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_flex.telemetry.record import IterationRecord
from megatron_flex.telemetry.throughput import Throughput, throughput


@dataclass(frozen=True)
class IntervalSummary:
    """The iterations since the last log line.

    Attributes:
        last: the newest iteration.
        iterations: how many they are.
        seconds_per_iteration: mean time of an iteration.
        losses: mean of each loss over the iterations that were not skipped; empty if all were.
        skipped: iterations without update.
        nan: those of them whose loss or gradient norm was NaN or infinite.
        throughput: tokens, padding and floating-point operations a second.
        typical: mean time of all iterations so far but the first of the run, which warms up.
    """

    last: IterationRecord
    iterations: int
    seconds_per_iteration: float
    losses: Mapping[str, float]
    skipped: int
    nan: int
    throughput: Throughput
    typical: float = 0.0


class Interval:
    """Collects iterations and says when a log line is due.

    As in Megatron-LM a line is due at multiples of ``log_interval``, and after the first iteration
    of a run, which also stays part of the interval that it begins.
    """

    def __init__(self, log_interval: int, world_size: int, peak_flops: float | None = None) -> None:
        self._log_interval = log_interval
        self._world_size = world_size
        self._peak_flops = peak_flops
        self._records: list[IterationRecord] = []
        self._first = True
        self._seconds: list[float] = [0.0, 0.0]  # of the first iteration, and of all others
        self._count = 0

    def add(self, record: IterationRecord) -> IntervalSummary | None:
        """Take one iteration; the summary if a line is due."""
        self._records.append(record)
        self._seconds[self._count > 0] += record.elapsed
        self._count += 1
        due = record.iteration % self._log_interval == 0
        summary = self._summary() if due or self._first else None
        self._first = False
        if due:
            self._records.clear()
        return summary

    def _summary(self) -> IntervalSummary:
        records = self._records
        elapsed = sum(r.elapsed for r in records)
        advanced = [r for r in records if not r.skipped]
        names = dict.fromkeys(name for r in advanced for name in r.losses)
        return IntervalSummary(
            last=records[-1],
            iterations=len(records),
            seconds_per_iteration=elapsed / len(records),
            losses={n: sum(r.losses.get(n, 0.0) for r in advanced) / len(advanced) for n in names},
            skipped=len(records) - len(advanced),
            nan=sum(r.skipped and _not_finite(r) for r in records),
            throughput=throughput(records, self._world_size, self._peak_flops),
            typical=self._seconds[self._count > 1] / max(1, self._count - 1),
        )


def _not_finite(record: IterationRecord) -> bool:
    return not (record.finite and all(math.isfinite(v) for v in record.losses.values()))
