"""``--flexpipe-trace``: every instruction of every worker, for Perfetto or chrome://tracing.

A process row a worker, with one line each for computing, for activations and gradients, for
reductions and updates, and for state on its way to another worker. Workers write parts of their
own while they run; the first one joins them at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_flex.schedule.instructions import (
    Compute,
    Drop,
    Instruction,
    StateOp,
    Transfer,
)
from megatron_flex.telemetry.sink import TelemetryError

LINES = ("compute", "messages", "reductions and updates", "state")


def line_of(instruction: Instruction) -> int:
    """The line of a worker's row that an instruction belongs on."""
    if isinstance(instruction, Compute):
        return 0
    if isinstance(instruction, Transfer):
        return 1
    return 3 if isinstance(instruction, StateOp | Drop) else 2


class TraceWriter:
    """One worker's part of a trace.

    Raises:
        TelemetryError: when the file cannot be written.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._path = Path(path)
        self._rank = rank
        self._part = part_of(self._path, rank)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("w", encoding="utf-8")
        except OSError as error:
            raise TelemetryError(
                f"--flexpipe-trace: {self._part} cannot be written: {error.strerror or error}"
            ) from error
        self._write({"name": "process_name", "ph": "M", "pid": rank,
                     "args": {"name": f"worker {rank}"}})  # fmt: skip
        for number, name in enumerate(LINES):
            self._write({"name": "thread_name", "ph": "M", "pid": rank, "tid": number,
                         "args": {"name": name}})  # fmt: skip

    def add(
        self,
        iteration: int,
        spans: Iterable[tuple[Instruction, float, float]],
        about: Mapping[str, Any] | None = None,
        planned: Mapping[Compute, tuple[float, float]] | None = None,
    ) -> None:
        """Append one iteration: instructions with start and stop in seconds of one clock.

        Args:
            about: what a reader needs to know of the iteration; one worker gives it.
            planned: when operations were predicted to run, in seconds from the iteration's start.
        """
        if about is not None:
            self._write({"name": "iteration", "ph": "M", "pid": self._rank,
                         "args": {"iteration": iteration, **about}})  # fmt: skip
        for instruction, start, stop in spans:
            name, _, arguments = str(instruction).partition(" ")
            args: dict[str, Any] = {"iteration": iteration, "what": arguments}
            if planned and isinstance(instruction, Compute) and instruction in planned:
                args["planned"] = planned[instruction]
            self._write(
                {
                    "name": name,
                    "ph": "X",
                    "pid": self._rank,
                    "tid": line_of(instruction),
                    "ts": start * 1e6,
                    "dur": (stop - start) * 1e6,
                    "args": args,
                }
            )
        self._file.flush()

    def close(self) -> None:
        """End this worker's part."""
        self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")


def part_of(path: Path, rank: int) -> Path:
    """Where a worker's part lies until it is joined."""
    return path.with_name(f".{path.name}.part{rank}")


def join(path: str, world_size: int) -> None:
    """Make the trace of all parts, when every worker has closed its own; parts are removed.

    Parts of workers on servers with other disks stay where they are.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.new")
    parts = [p for p in (part_of(target, rank) for rank in range(world_size)) if p.exists()]
    with temporary.open("w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for part in parts:
            out.write(part.read_text(encoding="utf-8"))
        out.write("{}\n]}\n")
    os.replace(temporary, target)
    for part in parts:
        part.unlink()
