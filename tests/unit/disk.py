"""What a test asks of the disk."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The system refuses to let a file of this process grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(monkeypatch: pytest.MonkeyPatch, size: int) -> list[int]:
    """From now on there is room for ``size`` bytes; gives what is left, which may be set.

    As of a system's disk: of what is larger than the room a part is written.
    """
    left, write_all = [size], os.write

    def write_some(file: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write_all(file, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", write_some)
    return left
