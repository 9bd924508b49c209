"""Weights & Biases, if its package is installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_flex.telemetry.files import make_directory, said, try_file
from megatron_flex.telemetry.interval import IntervalSummary
from megatron_flex.telemetry.record import CompletionRecord, IterationRecord, ValidationRecord
from megatron_flex.telemetry.scalars import (
    Scalar,
    ScalarOptions,
    interval_scalars,
    iteration_scalars,
    validation_scalars,
)
from megatron_flex.telemetry.sink import TelemetryError

FLAG = "--wandb-save-dir"


class WandbSink:
    """Records Megatron's series in one run of a project.

    Raises:
        TelemetryError: when the ``wandb`` package is missing.
    """

    def __init__(
        self,
        project: str,
        name: str,
        directory: str,
        options: ScalarOptions,
        *,
        entity: str | None = None,
        config: Mapping[str, Any] | None = None,
        log_interval: int = 1,
    ) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise TelemetryError(
                f"--wandb-project needs the wandb package ({error}): install it, or remove the flag"
            ) from error
        check(Path(directory))
        self._wandb = wandb
        self._run = wandb.init(
            project=project, name=name, dir=directory, entity=entity, config=dict(config or {})
        )
        self._options = options
        self._log_interval = log_interval

    def iteration(self, record: IterationRecord) -> None:
        """Points of an iteration, every ``--tensorboard-log-interval``."""
        if record.iteration % self._log_interval == 0:
            samples = Scalar("samples vs steps", record.consumed_samples)
            self._log((samples, *iteration_scalars(record, self._options)), record.iteration)

    def interval(self, summary: IntervalSummary) -> None:
        """Points of a log line."""
        self._log(interval_scalars(summary, self._options), summary.last.iteration)

    def validation(self, record: ValidationRecord) -> None:
        """Points of a validation."""
        self._log(validation_scalars(record, self._options), record.iteration)

    def completions(self, records: Sequence[CompletionRecord]) -> None:
        """A table of prompts and completions."""
        rows = [[r.prompt, r.completion] for r in records]
        table = self._wandb.Table(columns=["prompt", "completion"], data=rows)
        self._run.log({"completions": table}, step=records[0].iteration)

    def close(self) -> None:
        """End the run."""
        self._run.finish()

    def _log(self, scalars: Iterable[Scalar], iteration: int) -> None:
        values = {scalar.name: scalar.value for scalar in scalars}
        if values:
            self._run.log(values, step=iteration)


def check(directory: Path) -> None:
    """Raise ``TelemetryError`` unless files can be made there."""
    with said(directory, FLAG):
        make_directory(directory)
    try_file(directory / "run", FLAG)
