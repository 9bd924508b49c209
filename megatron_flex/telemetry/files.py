"""Files that a run writes beside its checkpoints: tried at the start, whole at every moment, and
nobody else's.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from megatron_flex.telemetry.sink import TelemetryError

Writer = TypeVar("Writer")

_TRIED = 4096
"""Bytes that must fit on the disk when a run starts."""


class GrowingFile:
    """A file that grows by whole pieces: one that cannot be written in full leaves nothing behind.

    Raises:
        TelemetryError: ``flag`` and path, and why it cannot be written.
    """

    def __init__(self, path: Path, flag: str) -> None:
        self._path, self._flag = path, flag
        with said(path, flag):
            make_directory(path.parent)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o644)
            self._regular = stat.S_ISREG(os.fstat(self._file).st_mode)

    def append(self, data: bytes) -> None:
        """Add a piece; after :meth:`close` it is lost."""
        if self._file < 0:
            return
        with said(self._path, self._flag):
            size = os.fstat(self._file).st_size
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except BaseException:
                if self._regular:
                    os.ftruncate(self._file, size)
                raise

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Expendable(Generic[Writer]):
    """A writer whose failure ends no training: it is given up, and a word is said, once."""

    def __init__(self, writer: Writer | None, warn: Callable[[str], None]) -> None:
        self.writer = writer
        self._warn = warn

    def __call__(self, write: Callable[[Writer], object]) -> None:
        """Let the writer do something, if there still is one."""
        if self.writer is None:
            return
        try:
            write(self.writer)
        except TelemetryError as error:
            self.writer = None
            self._warn(f" warning: {error}; training goes on without it")


@contextlib.contextmanager
def said(path: Path, flag: str) -> Iterator[None]:
    """Put the system's errors in words."""
    try:
        yield
    except OSError as error:
        raise TelemetryError(
            f"{flag} {path} cannot be written: {error.strerror or error}; give a path with write"
            " permission and space"
        ) from error


def make_directory(path: Path) -> None:
    """Make a directory, and those above it, where they are missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(None, "Not a directory") from None


def try_file(path: Path, flag: str) -> None:
    """Find out whether a file can be written, without touching one that is there.

    Raises:
        TelemetryError: it is a directory, or the directory cannot be made, written to, or is full.
    """
    with said(path, flag):
        if path.is_dir():
            raise IsADirectoryError(None, "Is a directory")
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK))
            if not path.is_file():
                return  # a device or a pipe: there is nothing beside it to try
        make_directory(path.parent)
        trial = path.with_name(f".{path.name}.trial{os.getpid()}")
        try:
            with trial.open("wb") as file:
                file.write(bytes(_TRIED))
                file.flush()
                os.fsync(file.fileno())
        finally:
            trial.unlink(missing_ok=True)


def replace(path: Path, pieces: Iterable[bytes]) -> None:
    """Give a file another content as a whole; on an error the old one stays."""
    temporary = path.with_name(f".{path.name}.new{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.chmod(temporary, path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def set_aside(path: Path) -> Path:
    """Give what an earlier run wrote another name: the path with a number."""
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    os.rename(path, target)
    return target


def not_ours(path: Path, flag: str, kind: str) -> TelemetryError:
    """The error of a path where another's file lies."""
    return TelemetryError(
        f"{flag} {path} exists and is not {kind} that a run wrote: it stays as it is; give another"
        " file, or move this one away"
    )
