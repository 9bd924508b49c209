"""What a run came to, said at its end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from megatron_flex.config.config import Config
from megatron_flex.quantities import count, duration
from megatron_flex.telemetry.interval import IntervalSummary
from megatron_flex.telemetry.record import CompletionRecord, IterationRecord, ValidationRecord

_SMOOTH = 10  # iterations whose mean is the loss at the beginning and at the end


class Summary:
    """A sink that keeps totals."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: list[float] = []
        self._name = "lm loss"
        self._iterations = self._tokens = self._switches = 0
        self._seconds = 0.0
        self._sliced = self._slices = 0
        self._predicted = self._whole = 0.0  # of iterations with slices, and without them
        self._iteration = 0
        self._plans: dict[str, None] = {}
        self._plan = ""
        self._validations: dict[str, tuple[str, float]] = {}

    def iteration(self, record: IterationRecord) -> None:
        """Count an iteration."""
        self._iterations += 1
        self._iteration = record.iteration
        self._tokens += record.tokens
        self._seconds += record.elapsed
        for name, value in list(record.losses.items())[:1]:
            if not record.skipped:
                self._name = name
                if len(self._first) < _SMOOTH:
                    self._first.append(value)
                self._last = [*self._last, value][-_SMOOTH:]
        self._sliced += int(record.extra.get("sliced-samples", 0))
        self._slices += int(record.extra.get("slices", 0))
        if "predicted-without-slices" in record.extra:
            self._predicted += record.extra["predicted-uncorrected"]
            self._whole += record.extra["predicted-without-slices"]
        stages = record.plan.partition(";")[0].strip()
        self._switches += bool(self._plan) and stages != self._plan
        self._plan = stages
        self._plans[stages] = None

    def interval(self, summary: IntervalSummary) -> None:
        """Nothing: iterations are counted."""

    def validation(self, record: ValidationRecord) -> None:
        """Keep the newest of each set."""
        kind = "test" if record.test else "validation"
        for name, value in list(record.losses.items())[:1]:
            self._validations[kind] = (name, value)

    def completions(self, records: Sequence[CompletionRecord]) -> None:
        """Nothing: they are no figures."""

    def close(self) -> None:
        """Nothing is pending."""

    def lines(self, config: Config, saved: int | None) -> Iterator[str]:
        """The summary of a run that is complete, or was stopped; ``saved``: its last checkpoint."""
        yield " ---- summary ----"
        if self._iterations:
            rate = self._tokens / max(self._seconds, 1e-9)
            yield (
                f" trained: {self._iterations:,} iterations, up to iteration {self._iteration:,} of"
                f" {config.training.train_iters:,}; {count(self._tokens)} tokens in"
                f" {duration(self._seconds)} ({count(rate)} tokens/s)"
            )
        if self._last:
            # Of a short run the halves, so that its end and its beginning have none in common.
            n = max(1, min(len(self._last), self._iterations // 2))
            a, b = sum(self._first[:n]) / n, sum(self._last[-n:]) / n
            of = f" (means of the last and the first {n} iterations)" if n > 1 else ""
            yield f" {self._name}: {b:.4f}, from {a:.4f}{of}"
        for kind, (name, value) in self._validations.items():
            yield f" {kind} {name}: {value:.4f}"
        if self._iterations:
            only = f": {self._plan}" if len(self._plans) == 1 else ""
            yield f" plans: {len(self._plans)}{only}; switches: {self._switches}"
        if self._sliced:
            saves = ""
            if self._predicted:
                factor = self._whole / self._predicted
                saves = (
                    "; with whole samples the same plans would take"
                    f" {factor:.2f} times as long, by the cost model"
                )
            yield f" slices: {self._sliced:,} long samples in {self._slices:,} slices{saves}"
        if saved is not None:
            yield f" checkpoint: iteration {saved:,} in {config.checkpoint.save}"
        elif self._iterations and config.checkpoint.save is None:
            yield " checkpoint: none was saved (--save DIRECTORY saves them)"
        g, record = config.logging, config.flexpipe.flexpipe_record
        curves = g.tensorboard_dir
        for what, path in (
            ("log in full", g.log_file),
            ("every iteration as JSON", g.log_jsonl),
            ("curves", curves and f"tensorboard --logdir {shlex.quote(curves)}"),
            ("plans and their reasons", record),
            ("timeline", config.flexpipe.flexpipe_trace),
        ):
            if path:
                yield f" {what}: {path}"
