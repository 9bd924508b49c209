"""Log lines, on the standard output or in a file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from megatron_flex.telemetry.interval import IntervalSummary
from megatron_flex.telemetry.log_line import (
    completion_line,
    short_line,
    short_validation_line,
    training_line,
    validation_lines,
)
from megatron_flex.telemetry.record import CompletionRecord, IterationRecord, ValidationRecord


class ConsoleSink:
    """Prints a line for each interval, and one (in Megatron's form three) for each validation."""

    def __init__(
        self,
        train_iters: int,
        *,
        log_throughput: bool = False,
        short: bool = False,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        self._train_iters = train_iters
        self._log_throughput = log_throughput
        self._short = short
        self._echo = echo or say

    def iteration(self, record: IterationRecord) -> None:
        """Nothing: lines are for intervals."""

    def interval(self, summary: IntervalSummary) -> None:
        """Print the line."""
        if self._short:
            self._echo(short_line(summary, self._train_iters))
            return
        self._echo(training_line(summary, self._train_iters, log_throughput=self._log_throughput))

    def validation(self, record: ValidationRecord) -> None:
        """Print the losses and perplexities, in Megatron's form between two rules."""
        if self._short:
            self._echo(short_validation_line(record))
            return
        for line in validation_lines(record):
            self._echo(line)

    def completions(self, records: Sequence[CompletionRecord]) -> None:
        """Print each prompt, shortened, with its completion."""
        for record in records:
            self._echo(completion_line(record))

    def close(self) -> None:
        """Nothing is pending."""


def say(line: str) -> None:
    """Print a line at once. Training goes on where nobody reads it, or the disk is full."""
    with contextlib.suppress(OSError):
        print(line, flush=True)
