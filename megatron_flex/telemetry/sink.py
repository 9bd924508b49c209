"""Where records go: the protocol that log lines, JSONL, TensorBoard and W&B implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_flex.telemetry.interval import IntervalSummary
from megatron_flex.telemetry.record import CompletionRecord, IterationRecord, ValidationRecord


class TelemetryError(RuntimeError):
    """A record that cannot be written; the message names the file and what to change."""


class Sink(Protocol):
    """Takes records as they come, in the order of iterations."""

    def iteration(self, record: IterationRecord) -> None:
        """One iteration."""

    def interval(self, summary: IntervalSummary) -> None:
        """The iterations up to a log line; comes after its last iteration."""

    def validation(self, record: ValidationRecord) -> None:
        """One validation or test."""

    def completions(self, records: Sequence[CompletionRecord]) -> None:
        """The prompts that were completed at one validation."""

    def close(self) -> None:
        """Write out what is pending."""
