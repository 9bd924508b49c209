"""A simulation's file: a line of JSON an iteration, and beside it the state to go on from.

The first line says what is simulated (``event`` is ``run``, as in training). A file whose first
line says the same is gone on with: lines after the last state are simulated again, and come out as
they were. Lines are appended whole, and the state is replaced as a whole, so both can be read at
any time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_flex.telemetry.files import GrowingFile, not_ours, replace, said, try_file
from megatron_flex.telemetry.sink import TelemetryError

FLAG = "--output"
EVERY = 25
"""Iterations between states."""


def first_line(header: Mapping[str, Any]) -> bytes:
    """Of the file of a simulation."""
    about = {"event": "run", "iteration": 0, "kind": "simulation", **header}
    return (json.dumps(about) + "\n").encode()


def is_of(path: Path, header: Mapping[str, Any]) -> bool:
    """Whether a simulation may write there: nothing is there yet, or what it began itself."""
    try:
        with path.open("rb") as stream:
            line, first = stream.readline(), first_line(header)
    except OSError:
        return True  # who opens it says what is wrong
    return line == first or (not line.endswith(b"\n") and first.startswith(line))


class SimulationFile:
    """The file of one configuration.

    Attributes:
        start: iterations that are there already.
        state: of the simulation after these; ``None`` at the start.

    Raises:
        TelemetryError: it cannot be written, or holds something else.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self._beside = path.with_suffix(".state.json")
        self.start = 0
        self.state: dict[str, Any] | None = None
        try_file(path, FLAG)
        self._resume(header)
        self._file = GrowingFile(path, FLAG)

    def _resume(self, header: Mapping[str, Any]) -> None:
        first = first_line(header)
        with said(self.path, FLAG):
            lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
            if not is_of(self.path, header):
                raise not_ours(self.path, FLAG, "this simulation, with the same arguments,")
            if lines and lines[0] != first:
                lines = []
            state = self._known()
            whole = [line for line in lines[1:] if line.endswith(b"\n")]
            if state is not None and 0 < state["iteration"] <= len(whole):
                self.state, self.start = state, state["iteration"]
            kept = [first, *whole[: self.start]]
            if lines != kept:
                replace(self.path, kept)

    def _known(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._beside.read_text())
        except (OSError, ValueError):
            return None
        known = isinstance(found, dict) and isinstance(found.get("iteration"), int)
        return found if known else None

    @property
    def damaged(self) -> TelemetryError:
        """The state cannot be gone on with."""
        return TelemetryError(
            f"{FLAG}: {self._beside} is damaged: remove it, and this configuration is simulated"
            " from its beginning"
        )

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a line."""
        self._file.append((json.dumps(record) + "\n").encode())

    def save(self, iteration: int, state: Mapping[str, Any]) -> None:
        """After ``iteration`` iterations."""
        with said(self._beside, FLAG):
            replace(self._beside, [json.dumps({"iteration": iteration, **state}).encode()])

    def records(self) -> list[dict[str, Any]]:
        """All iterations so far."""
        lines = self.path.read_bytes().splitlines()[1:]
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close the file."""
        self._file.close()
