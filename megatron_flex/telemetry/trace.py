"""``--flexpipe-trace``: every instruction of every worker, for Perfetto or chrome://tracing.

A process row a worker, with one line each for computing, for activations and gradients, for
reductions and updates, and for state on its way to another worker. Workers write parts of their
own while they run; the first one joins them at the end. A run that is resumed goes on in the same
trace.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_flex.schedule.instructions import (
    Compute,
    Drop,
    Instruction,
    StateOp,
    Transfer,
)
from megatron_flex.telemetry.files import (
    GrowingFile,
    not_ours,
    replace,
    said,
    set_aside,
    try_file,
)

FLAG = "--flexpipe-trace"
LINES = ("compute", "messages", "reductions and updates", "state")
_HEAD = b'{"displayTimeUnit": "ms", "traceEvents": [\n'
_TAIL = b"{}\n]}\n"


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
        self._rank = rank
        part = part_of(Path(path), rank)
        with said(part, FLAG):
            part.unlink(missing_ok=True)  # of a worker on a server with another disk
        self._file = GrowingFile(part, FLAG)
        about = [{"name": "process_name", "ph": "M", "pid": rank,
                  "args": {"name": f"worker {rank}"}}]  # fmt: skip
        for number, name in enumerate(LINES):
            about.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": number,
                          "args": {"name": name}})  # fmt: skip
        self._write(about)

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
        events: list[dict[str, Any]] = []
        if about is not None:
            events.append({"name": "iteration", "ph": "M", "pid": self._rank,
                           "args": {"iteration": iteration, **about}})  # fmt: skip
        for instruction, start, stop in spans:
            name, _, arguments = str(instruction).partition(" ")
            args: dict[str, Any] = {"iteration": iteration, "what": arguments}
            if planned and isinstance(instruction, Compute) and instruction in planned:
                args["planned"] = planned[instruction]
            events.append(
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
        self._write(events)

    def close(self) -> None:
        """End this worker's part."""
        self._file.close()

    def _write(self, events: Iterable[dict[str, Any]]) -> None:
        self._file.append("".join(f"{json.dumps(event)},\n" for event in events).encode())


def part_of(path: Path, rank: int) -> Path:
    """Where a worker's part lies until it is joined."""
    return path.with_name(f".{path.name}.part{rank}")


def parts_of(path: Path) -> list[Path]:
    """The parts that there are, by worker."""
    if not path.parent.is_dir():
        return []
    pattern = re.compile(rf"\.{re.escape(path.name)}\.part(\d+)")
    found = {int(m[1]): p for p in path.parent.iterdir() if (m := pattern.fullmatch(p.name))}
    return [part for _, part in sorted(found.items())]


def check(path: Path) -> None:
    """Raise ``TelemetryError`` unless a run may write there."""
    try_file(path, FLAG)
    if path.is_file():
        with said(path, FLAG), path.open("rb") as file:
            begin = file.read(len(_HEAD))
        if begin and begin != _HEAD:
            raise not_ours(path, FLAG, "a trace")


def resume(path: Path, iteration: int) -> str | None:
    """Prepare for a run that goes on after ``iteration``, before any worker writes; a word on it.

    What an earlier run left, parts of a killed one included, is joined up to ``iteration``. With
    ``iteration`` 0 it gets another name.

    Raises:
        TelemetryError: when the file cannot be written, or is another's.
    """
    check(path)
    late = join(path, until=iteration or None)
    if iteration == 0 and path.is_file() and path.stat().st_size:
        with said(path, FLAG):
            return f"{FLAG}: the trace of an earlier run is now {set_aside(path)}"
    if not late:
        return None
    return f"{FLAG}: iterations after {iteration}, which are trained again, were removed"


def join(path: Path, until: int | None = None) -> int:
    """Add all parts to the trace, when every worker has closed its own; parts are removed.

    Times of the parts are moved where they would come before the end of what there is: a machine's
    clock begins anew when it starts. Parts of workers on servers with other disks stay where they
    are.

    Args:
        until: the last iteration to keep.

    Returns:
        Number of events that were left out because they are of later iterations.
    """
    parts = parts_of(path)
    with said(path, FLAG):
        end, late = 0.0, 0
        for _, event in _events(path):
            late += _is_late(event, until)
            if not _is_late(event, until) and event["ph"] == "X":
                end = max(end, event["ts"] + event["dur"])
        if not parts and not late:
            return 0
        begin = min((e["ts"] for p in parts for _, e in _events(p) if e["ph"] == "X"), default=end)
        shift = max(0.0, end - begin)
        seen: set[bytes] = set()
        left_out = 0

        def lines() -> Iterator[bytes]:
            nonlocal left_out
            yield _HEAD
            for source in (path, *parts):
                for line, event in _events(source):
                    if _is_late(event, until):
                        left_out += 1
                    elif event["ph"] == "X" and source != path and shift:
                        yield json.dumps({**event, "ts": event["ts"] + shift}).encode() + b",\n"
                    elif line not in seen:
                        if event["ph"] == "M":
                            seen.add(line)
                        yield line
            yield _TAIL

        replace(path, lines())
        for part in parts:
            part.unlink()
    return left_out


def _events(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Lines of a trace or a part with their events; a torn line is left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.startswith(b'{"name"') and line.endswith(b",\n"):
                with contextlib.suppress(ValueError):
                    yield line, json.loads(line[:-2])


def _is_late(event: Mapping[str, Any], until: int | None) -> bool:
    return until is not None and event["args"].get("iteration", 0) > until
