"""The list of faults: each a small change to the source that some test must notice.

The list is data, one YAML file for each room in ``faults/``. Entries have a ``file``, the ``tests``
that should notice, and the faults in that file; a fault may name ``tests``, ``seconds`` (its time
limit) and ``harmless`` (why no test can notice it) of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).resolve().parent / "faults"

SECONDS = 120.0
"""Time limit of a fault that gives none."""

_ENTRY = {"file", "tests", "seconds", "faults"}
_FAULT = {"id", "old", "new", "breaks", "tests", "seconds", "harmless"}


class StaleList(ValueError):
    """Faults that do not fit the source: the message names them."""


@dataclass(frozen=True)
class Fault:
    """One change of the source.

    Attributes:
        id: its name, unique in the whole list.
        room: the list that it is from.
        file: what is changed, relative to the root of the tree.
        old, new: text that occurs exactly once in ``file``, and what takes its place.
        breaks: what is wrong then.
        tests: files or ids of tests, the smallest set that should notice, the quickest first.
        seconds: time limit of these tests.
        harmless: why the change makes no difference that a test could see; ``None`` if it does.
    """

    id: str
    room: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    seconds: float = SECONDS
    harmless: str | None = None

    @property
    def native(self) -> bool:
        """Whether the native library must be built again."""
        return self.file.startswith("kernels/")

    def applied(self, source: str) -> str:
        """``source`` with the fault in it; :class:`StaleList` unless ``old`` is there once."""
        found = source.count(self.old)
        if found != 1:
            raise StaleList(f"{self.id}: its old text occurs {found} times in {self.file}")
        return source.replace(self.old, self.new)


def load(directory: Path = LISTS) -> tuple[Fault, ...]:
    """All faults, room by room. Raises :class:`StaleList` if an entry is not as it should be."""
    faults: list[Fault] = []
    for path in sorted(directory.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            faults += _of_entry(path, entry)
    twice = [name for name, count in Counter(f.id for f in faults).items() if count > 1]
    if twice:
        raise StaleList(f"several faults have the same id: {', '.join(twice)}")
    return tuple(faults)


def _of_entry(path: Path, entry: dict[str, Any]) -> list[Fault]:
    _known(path, entry, _ENTRY)
    found = []
    for values in entry["faults"]:
        _known(path, values, _FAULT)
        found.append(
            Fault(
                id=values["id"],
                room=path.stem,
                file=entry["file"],
                old=values["old"],
                new=values["new"],
                breaks=values["breaks"],
                tests=tuple(values.get("tests", entry.get("tests", ()))),
                seconds=float(values.get("seconds", entry.get("seconds", SECONDS))),
                harmless=values.get("harmless"),
            )
        )
    return found


def _known(path: Path, values: dict[str, Any], names: set[str]) -> None:
    unknown = values.keys() - names
    if unknown:
        raise StaleList(f"{path.name}: {sorted(unknown)} of {values} is not known")


def problems(faults: tuple[Fault, ...], root: Path = ROOT) -> list[str]:
    """What of a list does not fit the source tree ``root``, a sentence each."""
    sources: dict[str, str] = {}
    found = []
    for fault in faults:
        try:
            if fault.file not in sources:
                sources[fault.file] = (root / fault.file).read_text(encoding="utf-8")
            fault.applied(sources[fault.file])
        except (OSError, StaleList) as error:
            found.append(str(error))
        if fault.old == fault.new:
            found.append(f"{fault.id}: changes nothing")
        if not fault.tests:
            found.append(f"{fault.id}: names no test")
        for test in fault.tests:
            path, *names = test.split("::")
            if path not in sources:
                sources[path] = (root / path).read_text() if (root / path).is_file() else ""
            name = names[-1].split("[")[0] if names else ""
            if not sources[path] or (names and f"def {name}(" not in sources[path]):
                found.append(f"{fault.id}: there is no test {test}")
    return found
