"""``--flexpipe-record``: the plan of every iteration, one a line, with its reason as a comment."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_flex.loop.plans import Choice
from megatron_flex.telemetry.files import (
    GrowingFile,
    not_ours,
    replace,
    said,
    set_aside,
    try_file,
)

FLAG = "--flexpipe-record"
_NUMBER = re.compile(rb"  # iteration (\d+)(;|$)")


class Recording:
    """A file that grows by a line an iteration.

    A run that resumes at iteration k keeps the first k lines. Where there are fewer, its first plan
    stands for those that are missing: line k + 1 is always iteration k + 1. A run that starts anew
    gives the file of an earlier one another name.

    Attributes:
        notice: what became of an earlier run's lines, if there were any in the way.

    Raises:
        TelemetryError: when the file cannot be read or written, or is another's.
    """

    def __init__(self, path: str, iteration: int) -> None:
        check(Path(path))
        with said(Path(path), FLAG):
            kept, self.notice = keep_until(Path(path), iteration)
        self._missing = range(kept + 1, iteration + 1)
        self._file = GrowingFile(Path(path), FLAG)

    def add(self, iteration: int, choice: Choice) -> None:
        """Append the plan of ``iteration``."""
        notes = [f"iteration {iteration + 1}"]
        if choice.action:
            notes.append(f"action {choice.action}")
        if choice.reason:
            notes.append(" ".join(choice.reason.split()))
        late = ",".join(f"{slab}@{device}" for slab, device in sorted(choice.late))
        text = f"{choice.plan} ~ {late}" if late else str(choice.plan)
        lines = [f"{choice.plan}  # iteration {k}; not recorded" for k in self._missing]
        self._missing = range(0)
        lines.append(f"{text}  # {'; '.join(notes)}")
        self._file.append("".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check(path: Path) -> None:
    """Raise ``TelemetryError`` unless a run may write there."""
    try_file(path, FLAG)
    if path.is_file():
        with said(path, FLAG):
            lines = path.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            found = _NUMBER.search(line.rstrip(b"\n"))
            if line.endswith(b"\n"):
                ours = found is not None and int(found[1]) == number
            else:  # torn
                ours = number > 1 or found is not None
            if not ours:
                raise not_ours(path, FLAG, "a record of plans")


def keep_until(path: Path, iteration: int) -> tuple[int, str | None]:
    """Remove torn lines and those after ``iteration``; how many are left, and a word on it."""
    if not path.is_file():
        return 0, None
    content = path.read_bytes()
    if iteration == 0 and content:
        return 0, f"{FLAG}: the record of an earlier run is now {set_aside(path)}"
    whole = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
    kept = whole[:iteration]
    if b"".join(kept) != content:
        replace(path, kept)
    if len(kept) == len(whole):
        return len(kept), None
    return len(kept), (
        f"{FLAG}: {len(whole) - len(kept)} plans of iterations after {iteration}, which are trained"
        " again, were removed"
    )
