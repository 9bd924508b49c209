"""The files of a run: its JSON lines, and plans and trace where there are some."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_flex.telemetry import jsonl

Record = dict[str, Any]

_PLAN = re.compile(
    r"(?P<plan>[^~#]*)(?:~(?P<late>[^#]*))?#\s*iteration (?P<number>\d+)(?P<rest>.*)"
)
_LATE = re.compile(r"(\d+)@(\d+)")


class ReportError(ValueError):
    """No run can be made of what was given; the message says what to give."""


@dataclass(frozen=True)
class PlanLine:
    """One line of ``--flexpipe-record``.

    Attributes:
        late: (slab, device) pairs that were handed over after the update of the iteration before.
        reason: why it was chosen, in words.
    """

    plan: str
    late: tuple[tuple[int, int], ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class RunData:
    """What the files of one run say.

    Attributes:
        name: what to call it.
        iterations: objects of ``--log-jsonl`` by iteration, ascending, each once.
        validations: the objects of evaluations, in order.
        about: for each iteration, the index of its object in ``runs``; -1: there is none.
        runs: objects that a run begins with.
        plans: lines of ``--flexpipe-record`` by iteration.
        trace: events of ``--flexpipe-trace`` by iteration.
    """

    name: str
    iterations: list[Record]
    validations: list[Record] = field(default_factory=list)
    about: list[int] = field(default_factory=list)
    runs: list[Record] = field(default_factory=list)
    plans: Mapping[int, PlanLine] = field(default_factory=dict)
    trace: Mapping[int, list[Record]] = field(default_factory=dict)

    @property
    def last_run(self) -> Record:
        """The newest object that a run begins with; empty without one."""
        return self.runs[-1] if self.runs else {}


def read_run(
    paths: Sequence[Path], name: str = "", progress: Callable[[Sequence[bytes]], Any] = iter
) -> RunData:
    """A run from a directory, or from its files.

    Of a directory the files are known by their beginnings, not by their names. A log that is named
    on its own brings plans and trace from its directory, unless several logs are there.

    ``progress`` goes through the lines of the log, such as a bar.

    Raises :class:`ReportError` where there is no JSONL file with an iteration, or several.
    """
    log, found = _files(paths)
    iterations, validations, about, runs = read_log(log, progress)
    if not iterations:
        raise ReportError(f"{log} has no iteration yet")
    if len(paths) == 1 and paths[0].is_file():
        beside = _by_kind([log.parent])
        found = beside if len(beside.get("log", [])) == 1 else found
    plans, traces = found.get("plans"), found.get("trace")
    return RunData(
        name or _name_of(log),
        iterations,
        validations,
        about,
        runs,
        read_plan_lines(plans[0]) if plans else {},
        read_trace(traces[0]) if traces else {},
    )


def runs_in(path: Path) -> list[Path]:
    """The runs of a path: a directory's simulations one by one, else the path itself."""
    if not path.is_dir():
        return [path]
    logs = _by_kind([path]).get("log", [])
    return logs if len(logs) > 1 and all(map(_simulated, logs)) else [path]


def _simulated(log: Path) -> bool:
    with log.open("rb") as file:
        first = jsonl.parse_line(file.readline())
    return first is not None and first.get("kind") == "simulation"


def log_of(paths: Sequence[Path]) -> Path:
    """The file of ``--log-jsonl`` among files and directories; errors as of :func:`read_run`."""
    return _files(paths)[0]


def _files(paths: Sequence[Path]) -> tuple[Path, dict[str, list[Path]]]:
    """The log, and all files by their kinds."""
    found = _by_kind(paths)
    logs = found.get("log", [])
    shown = " ".join(map(str, paths))
    if not logs:
        raise ReportError(
            f"{shown}: there is no file of --log-jsonl: train with this flag, or give its file"
        )
    if len(logs) > 1:
        names = ", ".join(p.name for p in logs)
        raise ReportError(f"{shown} has several files of --log-jsonl ({names}): give one of them")
    return logs[0], found


def _by_kind(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by what they are, without those of earlier runs, which have a number at their end."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += [p for p in sorted(path.iterdir()) if p.is_file() and p.name[0] != "."]
        elif path.is_file():
            files.append(path)
        else:
            raise ReportError(f"{path} is not there: give the directory of a run, or its files")
    found: dict[str, list[Path]] = {}
    for path in files:
        earlier = re.fullmatch(r"\.\d+", path.suffix) and path not in paths
        if not earlier and (kind := kind_of(path)) is not None:
            found.setdefault(kind, []).append(path)
    return found


def kind_of(path: Path) -> str | None:
    """``log``, ``plans`` or ``trace`` by a file's beginning; ``None``: something else."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError:
        return None
    if head.startswith(b'{"event": "'):
        return "log"
    if head.startswith(b'{"displayTimeUnit"') and b'"traceEvents"' in head:
        return "trace"
    first = head.partition(b"\n")[0].decode(errors="replace")
    return "plans" if _PLAN.fullmatch(first.strip()) else None


def read_log(
    path: Path, progress: Callable[[Sequence[bytes]], Any] = iter
) -> tuple[list[Record], list[Record], list[int], list[Record]]:
    """Iterations (each once, ascending), evaluations, the run of each iteration, and the runs."""
    numbered: dict[int, tuple[Record, int]] = {}
    validations: list[Record] = []
    runs: list[Record] = []
    for line in progress(path.read_bytes().splitlines(keepends=True)):
        record = jsonl.parse_line(line)
        if record is None:
            continue
        event = record["event"]
        if event == "run":
            runs.append(record)
        elif event == "iteration":
            numbered[record["iteration"]] = (record, len(runs) - 1)
        else:
            validations.append(record)
    order = sorted(numbered)
    return (
        [numbered[k][0] for k in order],
        validations,
        [numbered[k][1] for k in order],
        runs,
    )


def read_plan_lines(path: Path) -> dict[int, PlanLine]:
    """Lines of a record of plans by iteration; others are left out."""
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        match = _PLAN.fullmatch(line.strip())
        if match is None:
            continue
        late = tuple((int(a), int(b)) for a, b in _LATE.findall(match["late"] or ""))
        notes = [note.strip() for note in match["rest"].split(";")]
        reason = "; ".join(n for n in notes if n and not n.startswith("action "))
        found[int(match["number"])] = PlanLine(match["plan"].strip(), late, reason)
    return found


def read_trace(path: Path) -> dict[int, list[Record]]:
    """Events of a trace by iteration, those that tell of the iteration first."""
    found: dict[int, list[Record]] = {}
    with path.open("rb") as file:
        for line in file:
            if not line.startswith(b'{"name"'):
                continue
            try:
                event = json.loads(line.rstrip(b",\r\n"))
            except ValueError:
                continue  # torn
            iteration = event.get("args", {}).get("iteration")
            if iteration is not None:
                found.setdefault(iteration, []).append(event)
    return found


def _name_of(path: Path) -> str:
    """What a reader would call a run: the file's directory, or its name if that says more."""
    path = path.resolve()
    return path.parent.name if path.stem in ("log", "iterations") else path.stem
