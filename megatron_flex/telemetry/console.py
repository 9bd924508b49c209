"""Log lines on the standard output."""

from __future__ import annotations

from collections.abc import Callable

from megatron_flex.telemetry.interval import IntervalSummary
from megatron_flex.telemetry.log_line import training_line, validation_lines
from megatron_flex.telemetry.record import IterationRecord, ValidationRecord


class ConsoleSink:
    """Prints a line for each interval and three for each validation."""

    def __init__(
        self,
        train_iters: int,
        *,
        log_throughput: bool = False,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        self._train_iters = train_iters
        self._log_throughput = log_throughput
        self._echo = echo or _print

    def iteration(self, record: IterationRecord) -> None:
        """Nothing: lines are for intervals."""

    def interval(self, summary: IntervalSummary) -> None:
        """Print the line."""
        self._echo(training_line(summary, self._train_iters, log_throughput=self._log_throughput))

    def validation(self, record: ValidationRecord) -> None:
        """Print the losses and perplexities between two rules."""
        for line in validation_lines(record):
            self._echo(line)

    def close(self) -> None:
        """Nothing is pending."""


def _print(line: str) -> None:
    print(line, flush=True)
