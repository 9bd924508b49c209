"""What a test asks of the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """From now on: which files were synced and which names were given, in order.

    Entries are ("sync", path) and ("name", new path).
    """
    found: list[tuple[str, str]] = []
    real: Callable[[int], None] = os.fsync

    def sync(descriptor: int) -> None:
        found.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    def naming(function: Callable[..., None]) -> Callable[..., None]:
        def rename(old: str | Path, new: str | Path, **options: int) -> None:
            function(old, new, **options)
            found.append(("name", str(new)))

        return rename

    monkeypatch.setattr(os, "fsync", sync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, naming(getattr(os, name)))
    return found
