"""Records as JSON lines: one object an iteration, appended as they come.

Every line is written at once and complete, so a process that is killed leaves at most one torn line
at the end, which the next run removes. A run that resumes at iteration k removes what an earlier
run wrote after k: it will write these iterations again.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_flex.telemetry.interval import IntervalSummary
from megatron_flex.telemetry.record import IterationRecord, ValidationRecord
from megatron_flex.telemetry.sink import TelemetryError


class JsonlSink:
    """Appends to a file of JSON lines.

    Each object has ``event`` (``iteration``, ``validation`` or ``test``) and ``iteration``. Numbers
    that are not finite are the strings ``NaN``, ``Infinity`` and ``-Infinity``.

    Raises:
        TelemetryError: when the file cannot be read or written, at construction or later.
    """

    def __init__(self, path: str | os.PathLike[str], start_iteration: int = 0) -> None:
        """Open ``path``; keep only what belongs to iterations up to ``start_iteration``."""
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            keep_until(self._path, start_iteration)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o644)
        except OSError as error:
            raise self._error(error) from error

    def iteration(self, record: IterationRecord) -> None:
        """Append one object."""
        self._append(iteration_object(record))

    def interval(self, summary: IntervalSummary) -> None:
        """Nothing: every iteration has its own object."""

    def validation(self, record: ValidationRecord) -> None:
        """Append one object."""
        self._append(
            {
                "event": "test" if record.test else "validation",
                "iteration": record.iteration,
                "consumed_samples": record.consumed_samples,
                "samples": record.samples,
                "tokens": record.tokens,
                **record.losses,
            }
        )

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, values: Mapping[str, Any]) -> None:
        line = (json.dumps({k: _plain(v) for k, v in values.items()}) + "\n").encode()
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise self._error(error) from error
        if written < len(line):
            raise TelemetryError(f"--log-jsonl {self._path}: the disk is full; free some space")

    def _error(self, error: OSError) -> TelemetryError:
        return TelemetryError(
            f"--log-jsonl {self._path} cannot be written: {error.strerror or error}; give a file in"
            " a directory with write permission and space"
        )


def iteration_object(record: IterationRecord) -> dict[str, Any]:
    """The JSON object of an iteration; what was not measured is left out."""
    values: dict[str, Any] = {
        "event": "iteration",
        "iteration": record.iteration,
        "consumed_samples": record.consumed_samples,
        "elapsed": record.elapsed,
        **record.losses,
        "learning_rate": record.learning_rate,
        "global_batch_size": record.global_batch_size,
        "grad_norm": record.grad_norm,
        "loss_scale": record.loss_scale,
        "skipped": record.skipped,
        "tokens": record.tokens,
        "padding": record.padding,
        "tokens_per_second": record.tokens / max(record.elapsed, 1e-9),
        "flops": record.flops,
        "num_zeros": record.num_zeros,
        "params_norm": record.params_norm,
        "plan": record.plan or None,
        **record.memory,
        **record.extra,
        "action": record.notes.get("action"),
        "time": record.time,
    }
    return {name: value for name, value in values.items() if value is not None}


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All complete objects of a file, in order."""
    with Path(path).open("rb") as lines:
        objects = (_parse(line) for line in lines)
        return [o for o in objects if o is not None]


def keep_until(path: Path, iteration: int) -> None:
    """Remove torn lines and the records of iterations after ``iteration``.

    The file is replaced as a whole, and only if something has to go.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        changed = any(not _belongs(line, iteration) for line in lines)
    if not changed:
        return
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as kept, path.open("rb") as lines:
            kept.writelines(line for line in lines if _belongs(line, iteration))
            kept.flush()
            os.fsync(kept.fileno())
        os.chmod(name, path.stat().st_mode & 0o777)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _belongs(line: bytes, iteration: int) -> bool:
    values = _parse(line)
    return values is not None and values["iteration"] <= iteration


def _parse(line: bytes) -> dict[str, Any] | None:
    """The object of a complete line of ours, else ``None``."""
    if not line.endswith(b"\n"):
        return None
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if isinstance(values, dict) and isinstance(values.get("iteration"), int):
        return values
    return None


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value
