"""TensorBoard files, through ``torch.utils.tensorboard``."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_flex.telemetry.interval import IntervalSummary
from megatron_flex.telemetry.record import IterationRecord, ValidationRecord
from megatron_flex.telemetry.scalars import (
    Scalar,
    ScalarOptions,
    interval_scalars,
    iteration_scalars,
    validation_scalars,
)
from megatron_flex.telemetry.sink import TelemetryError


class TensorBoardSink:
    """Writes Megatron's series to a directory.

    Raises:
        TelemetryError: when the ``tensorboard`` package is missing or the directory is not
            writable.
    """

    def __init__(
        self,
        directory: str,
        options: ScalarOptions,
        *,
        log_interval: int = 1,
        queue_size: int = 1000,
    ) -> None:
        try:
            # Imported here: it takes seconds and is optional.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TelemetryError(
                f"--tensorboard-dir needs the tensorboard package ({error}): install it, or remove"
                " the flag"
            ) from error
        try:
            self._writer = SummaryWriter(log_dir=directory, max_queue=queue_size)
        except OSError as error:
            raise TelemetryError(
                f"--tensorboard-dir {directory} cannot be written: {error.strerror or error}"
            ) from error
        self._options = options
        self._log_interval = log_interval
        self._plan = ""

    def iteration(self, record: IterationRecord) -> None:
        """Points of an iteration, every ``--tensorboard-log-interval``; each new plan as text."""
        if record.iteration % self._log_interval == 0:
            scalars = iteration_scalars(record, self._options)
            self._add(scalars, record.iteration, record.consumed_samples)

        if record.plan != self._plan:
            self._plan = record.plan
            self._writer.add_text("plan", f"`{record.plan}`", record.iteration)

    def interval(self, summary: IntervalSummary) -> None:
        """Points of a log line."""
        last = summary.last
        self._add(interval_scalars(summary, self._options), last.iteration, last.consumed_samples)

    def validation(self, record: ValidationRecord) -> None:
        """Points of a validation."""
        scalars = validation_scalars(record, self._options)
        self._add(scalars, record.iteration, record.consumed_samples)

    def close(self) -> None:
        """Write out what is queued."""
        self._writer.close()

    def _add(self, scalars: Iterable[Scalar], iteration: int, samples: int) -> None:
        for scalar in scalars:
            self._writer.add_scalar(scalar.name, scalar.value, iteration)
            if scalar.by_samples:
                name = f"{scalar.name} vs samples"
                self._writer.add_scalar(name, scalar.value, samples)
