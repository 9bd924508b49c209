"""Records for the tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_flex.telemetry.record import CompletionRecord, IterationRecord, ValidationRecord


def record(iteration: int = 1, **changes: Any) -> IterationRecord:
    """An iteration of 16 samples that took half a second."""
    plain = IterationRecord(
        iteration=iteration,
        consumed_samples=16 * iteration,
        elapsed=0.5,
        learning_rate=1e-3,
        global_batch_size=16,
        losses={"lm loss": 4.0},
        grad_norm=1.25,
        skipped=False,
        tokens=1000,
        flops=2e12,
    )
    return dataclasses.replace(plain, **changes)


def completion(iteration: int = 10, **changes: Any) -> CompletionRecord:
    """A prompt whose completion ended after five tokens."""
    plain = CompletionRecord(iteration, 16 * iteration, "def f(", "x):\n  pass", 5, True)
    return dataclasses.replace(plain, **changes)


def validation(iteration: int = 10, **changes: Any) -> ValidationRecord:
    """A validation on 64 samples."""
    plain = ValidationRecord(
        where=f"iteration {iteration}",
        iteration=iteration,
        consumed_samples=16 * iteration,
        losses={"lm loss": 2.0},
        samples=64,
        tokens=4000,
    )
    return dataclasses.replace(plain, **changes)
