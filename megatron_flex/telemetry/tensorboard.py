"""TensorBoard files, in the form that ``torch.utils.tensorboard`` gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron_flex.telemetry.files import make_directory, said, try_file
from megatron_flex.telemetry.interval import IntervalSummary
from megatron_flex.telemetry.record import CompletionRecord, IterationRecord, ValidationRecord
from megatron_flex.telemetry.scalars import (
    BY_SAMPLES,
    Scalar,
    ScalarOptions,
    interval_scalars,
    iteration_scalars,
    validation_scalars,
)
from megatron_flex.telemetry.sink import TelemetryError

FLAG = "--tensorboard-dir"
HISTOGRAMS = frozenset({"lengths", "memory-by-worker"})
"""Figures of every sample or worker that are shown by how they are distributed."""
BINS = 24


class TensorBoardSink:
    """Writes Megatron's series to a directory.

    A run that resumes removes the points of iterations that it repeats.

    Attributes:
        notice: what became of an earlier run's points, if there were any in the way.

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
        start: tuple[int, int] = (0, 0),
    ) -> None:
        """Open a new file; keep only what belongs to ``start``'s iterations and samples."""
        check(Path(directory))
        try:
            # Imported here: it takes seconds and is optional.
            from torch.utils.tensorboard import summary

            from megatron_flex.telemetry import events
        except ImportError as error:
            raise TelemetryError(
                f"--tensorboard-dir needs the tensorboard package ({error}): install it, or remove"
                " the flag"
            ) from error
        self.notice = events.keep_until(Path(directory), *start)
        self._file = events.EventFile(Path(directory), queue_size)
        self._summary = summary
        self._options = options
        self._log_interval = log_interval
        self._plan = ""

    def iteration(self, record: IterationRecord) -> None:
        """Points and histograms of an iteration, every ``--tensorboard-log-interval``.

        Each new plan as text.
        """
        if record.iteration % self._log_interval == 0:
            scalars = iteration_scalars(record, self._options)
            self._add(scalars, record.iteration, record.consumed_samples)
            for name in HISTOGRAMS.intersection(record.lists):
                values = np.asarray(record.lists[name])
                self._file.add(self._summary.histogram(name, values, BINS), record.iteration)
        if record.plan != self._plan:
            self._plan = record.plan
            self._file.add(self._summary.text("plan", f"`{record.plan}`"), record.iteration)

    def interval(self, summary: IntervalSummary) -> None:
        """Points of a log line. All up to it are written: a worker that is killed loses no more."""
        last = summary.last
        self._add(interval_scalars(summary, self._options), last.iteration, last.consumed_samples)
        self._file.flush()

    def validation(self, record: ValidationRecord) -> None:
        """Points of a validation."""
        scalars = validation_scalars(record, self._options)
        self._add(scalars, record.iteration, record.consumed_samples)

    def completions(self, records: Sequence[CompletionRecord]) -> None:
        """Prompts and completions as text, a tag for each prompt."""
        for number, record in enumerate(records, start=1):
            # Indented by four, it is shown as it is.
            shown = "\n".join(
                ["prompt:", "", *_indented(record.prompt), "", "completion:", "",
                 *_indented(record.completion)]
            )  # fmt: skip
            self._file.add(self._summary.text(f"completions/{number}", shown), record.iteration)

    def close(self) -> None:
        """Write out what is queued."""
        self._file.close()

    def _add(self, scalars: Iterable[Scalar], iteration: int, samples: int) -> None:
        found = list(scalars)
        over_samples = [(f"{s.name}{BY_SAMPLES}", s.value) for s in found if s.by_samples]
        for step, points in (
            (iteration, [(s.name, s.value) for s in found]),
            (samples, over_samples),
        ):
            if points:
                first, *others = (self._summary.scalar(*point) for point in points)
                for other in others:
                    first.MergeFrom(other)
                self._file.add(first, step)


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.split("\n")]


def check(directory: Path) -> None:
    """Raise ``TelemetryError`` unless files can be made there."""
    with said(directory, FLAG):
        make_directory(directory)
    try_file(directory / "events.out.tfevents", FLAG)
