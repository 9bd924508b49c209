"""Records as JSON lines: one object an iteration, appended as they come.

Every line is written at once and complete, so a process that is killed leaves at most one torn line
at the end, which the next run removes. A run that resumes at iteration k removes what an earlier
run wrote after k: it will write these iterations again. A run that starts anew gives the file of an
earlier one another name.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_flex.telemetry.files import (
    GrowingFile,
    not_ours,
    replace,
    said,
    set_aside,
    try_file,
)
from megatron_flex.telemetry.interval import IntervalSummary
from megatron_flex.telemetry.record import (
    CompletionRecord,
    IterationRecord,
    RunRecord,
    ValidationRecord,
)

FLAG = "--log-jsonl"
_BEGIN = b'{"event": "'


class JsonlSink:
    """Appends to a file of JSON lines.

    Each object has ``event`` (``run``, ``iteration``, ``validation``, ``test`` or
    ``completion``) and
    ``iteration``. Numbers that are not finite are the strings ``NaN``, ``Infinity`` and
    ``-Infinity``.

    Attributes:
        notice: what became of an earlier run's lines, if there were any in the way.

    Raises:
        TelemetryError: when the file cannot be read or written, or is another's.
    """

    def __init__(self, path: str | os.PathLike[str], start_iteration: int = 0) -> None:
        """Open ``path``; keep only what belongs to iterations up to ``start_iteration``."""
        self._path = Path(path)
        check(self._path)
        with said(self._path, FLAG):
            self.notice = keep_until(self._path, start_iteration)
        self._file = GrowingFile(self._path, FLAG)

    def run(self, record: RunRecord) -> None:
        """Append the object that a run begins with."""
        values = {"event": "run", **asdict(record)}
        self._append({name: value for name, value in values.items() if value is not None})

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

    def completions(self, records: Sequence[CompletionRecord]) -> None:
        """Append an object for each."""
        for record in records:
            self._append({"event": "completion", **asdict(record)})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, values: Mapping[str, Any]) -> None:
        self._file.append((json.dumps({k: _plain(v) for k, v in values.items()}) + "\n").encode())


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
        **record.lists,
        "action": record.notes.get("action"),
        "reason": record.reason or None,
        "time": record.time,
    }
    return {name: value for name, value in values.items() if value is not None}


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All complete objects of a file, in order."""
    with Path(path).open("rb") as lines:
        objects = (parse_line(line) for line in lines)
        return [o for o in objects if o is not None]


def check(path: Path) -> None:
    """Raise ``TelemetryError`` unless a run may write there."""
    try_file(path, FLAG)
    if path.is_file():
        with said(path, FLAG), path.open("rb") as lines:
            if any(parse_line(line) is None and not _is_torn(line) for line in lines):
                raise not_ours(path, FLAG, "a log of iterations")


def keep_until(path: Path, iteration: int) -> str | None:
    """Remove torn lines and the records of iterations after ``iteration``; a word on it.

    The file is replaced as a whole, and only if something has to go. With ``iteration`` 0 it gets
    another name instead.
    """
    if not path.is_file() or not path.stat().st_size:
        return None
    with path.open("rb") as lines:
        parsed = [
            None if v is None else v["iteration"] <= iteration for v in map(parse_line, lines)
        ]
    late = parsed.count(False)
    if iteration == 0 and late:
        return f"{FLAG}: the log of an earlier run is now {set_aside(path)}"
    if late or None in parsed:
        with path.open("rb") as lines:
            replace(path, (line for line, kept in zip(lines, parsed, strict=True) if kept))
    if not late:
        return None
    return (
        f"{FLAG}: {late} records of iterations after {iteration}, which are trained again, were"
        " removed"
    )


def _is_torn(line: bytes) -> bool:
    """The rest of a line of ours (at the end), or of blocks that the system never filled."""
    rest = line.strip(b"\x00\r\n ")
    if line.endswith(b"\n"):
        return not rest
    return rest.startswith(_BEGIN) or _BEGIN.startswith(rest)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object of a complete line of ours, else ``None``."""
    if not line.endswith(b"\n") or not line.startswith(_BEGIN):
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
