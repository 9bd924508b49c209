"""What lies where on the disk, and how it gets there without ever being half-written.

``iter_0000100/`` is complete from the moment it has that name: it is written under a hidden
name, synchronised, and renamed. The tracker ``latest_checkpointed_iteration.txt`` (Megatron's)
is replaced last, by a rename too. What is deleted is renamed to a hidden name first.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_flex.checkpoint.errors import CheckpointError, describe

TRACKER = "latest_checkpointed_iteration.txt"

_NAME = re.compile(r"iter_(\d{7,})")
_TEMPORARY = re.compile(r"\.(?:tmp|old|trash)-iter_(\d{7,})-[0-9a-f]+")
_LOCK = ".checkpoint.lock"
_RENAME_EXCHANGE = 2  # linux/fs.h


def name_of(iteration: int) -> str:
    """Name of the directory of ``iteration``."""
    return f"iter_{iteration:07d}"


def iterations_in(directory: Path) -> list[int]:
    """Iterations whose directories are in ``directory``, ascending; all of them are complete."""
    if not directory.is_dir():
        return []
    found = (_NAME.fullmatch(entry.name) for entry in directory.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in found if match)


def latest(directory: Path | str) -> int | None:
    """The iteration that the tracker names, ``None`` when there is no checkpoint.

    Raises :class:`CheckpointError` for checkpoints without a tracker: only their owner can tell
    which to go on from, and a run that starts anew there would overwrite and delete them.
    """
    tracker = Path(directory) / TRACKER
    try:
        text = tracker.read_text().strip()
    except FileNotFoundError:
        return _without_tracker(Path(directory))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {tracker}: {describe(error)}") from error
    if text.isascii() and text.isdecimal():
        return int(text)
    raise CheckpointError(
        f"{tracker} contains {text[:40]!r} instead of an iteration; write one of"
        f" {_listing(Path(directory))} into it, or give --ckpt-step"
    )


def _without_tracker(directory: Path) -> int | None:
    """What :func:`latest` is of a directory that has no tracker."""
    found = iterations_in(directory)
    if not found:
        return None
    # A process killed between the two renames of the first :func:`publish` leaves the tracker
    # under its hidden name; the checkpoint it names is complete.
    for pending in sorted(directory.glob(f".{TRACKER}.*")):
        with suppress(FileNotFoundError):  # it has its name by now
            text = pending.read_text().strip()
            if text.isdecimal() and int(text) == found[-1]:
                return found[-1]
    if (directory / TRACKER).exists():
        return latest(directory)  # it was written meanwhile
    raise CheckpointError(
        f"{directory} holds checkpoints of iterations {_listing(directory)}, but no {TRACKER},"
        " which says where to go on: load one of them with --ckpt-step, or write its iteration"
        " into that file, or move them away to start anew"
    )


def _why_none(directory: Path) -> str:
    """Why there is nothing to load, by what else may have been meant."""
    if not directory.is_dir():
        return "there is no such directory"
    if (directory / "config.json").is_file():
        return "it is a Hugging Face directory: those are for --load-hf (or --loader hf)"
    if (directory.parent / TRACKER).is_file():
        return f"it is itself one of those in {directory.parent}: give that directory"
    return f"it has no {TRACKER}"


def locate(directory: Path | str, iteration: int | None = None) -> Path:
    """The directory of the checkpoint of ``iteration`` (default: the tracker's)."""
    directory = Path(directory)
    if iteration is None:
        iteration = latest(directory)
        if iteration is None:
            raise CheckpointError(f"no checkpoint in {directory}: {_why_none(directory)}")
    path = directory / name_of(iteration)
    if path.is_dir():
        return path
    # A process killed while it replaced a checkpoint of the same iteration, on a file system
    # that cannot exchange two names, leaves the earlier one under its hidden name.
    for old in sorted(directory.glob(f".old-{name_of(iteration)}-*")):
        return old
    raise CheckpointError(
        f"no checkpoint of iteration {iteration} in {directory}: there is {_listing(directory)}"
    )


def _listing(directory: Path) -> str:
    found = iterations_in(directory)
    earlier = f"{len(found) - 8} earlier ones, " if found[8:] else ""
    return earlier + ", ".join(map(str, found[-8:])) if found else "none"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of ``directory``, which dies with the process; refuse a second writer."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is saving into {directory}: give each run its own --save"
            ) from error
        except OSError as error:
            # Some network file systems have no locks; there the lock is only a precaution.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        yield
    finally:
        os.close(descriptor)


class Foreign:
    """Notices that another run has saved into a directory since this one last looked."""

    def __init__(self, directory: Path | str) -> None:
        self._tracker = Path(directory) / TRACKER
        self._known = self._stamp()

    def check(self) -> None:
        """Raise :class:`CheckpointError` if it has. Only while :func:`locked`."""
        found = self._stamp()
        if found not in (None, self._known):  # None: somebody has cleared the directory
            raise CheckpointError(
                f"another run has saved iteration {self._tracker.read_text()[:20]} into"
                f" {self._tracker.parent} while this one was running: give each run its own --save"
            )

    def saved(self) -> None:
        """This run has."""
        self._known = self._stamp()

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self._tracker.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns  # a new file each time


def create_temporary(directory: Path, iteration: int) -> Path:
    """Make the hidden directory that a checkpoint is written to."""
    path = directory / f".tmp-{name_of(iteration)}-{secrets.token_hex(4)}"
    path.mkdir()
    return path


def remove_leftovers(directory: Path) -> None:
    """Delete what killed processes left. Only while :func:`locked`."""
    for entry in directory.iterdir():
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None:
            if entry.name.startswith(f".{TRACKER}") and (directory / TRACKER).exists():
                entry.unlink(missing_ok=True)
        elif not entry.name.startswith(".old") or (directory / name_of(int(match[1]))).is_dir():
            shutil.rmtree(entry, ignore_errors=True)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the disk has the names in ``path``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot, and need not
            raise
    finally:
        os.close(descriptor)


def publish(temporary: Path, iteration: int) -> Path:
    """Give a complete checkpoint its name, then name it in the tracker."""
    directory = temporary.parent
    final = directory / name_of(iteration)
    sync_directory(temporary)
    # The tracker's new contents are on the disk before the first rename: on a disk that is full
    # the checkpoint fails as a whole.
    tracker = directory / f".{TRACKER}.{secrets.token_hex(4)}"
    try:
        write_synced(tracker, f"{iteration}".encode())
        replace_directory(temporary, final)
        sync_directory(directory)
        os.replace(tracker, directory / TRACKER)
        sync_directory(directory)
    finally:
        with suppress(OSError):
            tracker.unlink(missing_ok=True)
    return final


@contextmanager
def writing(directory: Path, iteration: int) -> Iterator[Path]:
    """A directory for one process to write a checkpoint to; it is published at the block's end.

    It goes where the block fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        remove_leftovers(directory)
        temporary = create_temporary(directory, iteration)
        try:
            yield temporary
            publish(temporary, iteration)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def discard(path: Path) -> None:
    """Delete a named checkpoint; it loses its name first, in one step."""
    trash = path.parent / f".trash-{path.name}-{secrets.token_hex(4)}"
    os.rename(path, trash)
    sync_directory(path.parent)
    shutil.rmtree(trash, ignore_errors=True)


def replace_directory(new: Path, final: Path) -> None:
    """Give a directory its name, in one step where the system can; an earlier one is deleted."""
    try:
        os.rename(new, final)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if _exchange(new, final):
        shutil.rmtree(new, ignore_errors=True)
        return
    old = final.parent / f".old-{final.name}-{secrets.token_hex(4)}"
    os.rename(final, old)
    os.rename(new, final)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; ``False`` where the system or file system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_cwd = -100
    result: int = call(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), _RENAME_EXCHANGE)
    return result == 0
