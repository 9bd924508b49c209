"""The error of this room, and how the operating system's errors are put into words."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

_ADVICE = {
    errno.ENOSPC: "the disk is full: free space there, or save elsewhere",
    errno.EDQUOT: "the disk quota is used up: free space there, or save elsewhere",
    errno.EFBIG: "the file size limit is reached: raise it (ulimit -f), or save elsewhere",
    errno.EROFS: "the file system is read-only: save elsewhere",
    errno.EACCES: "permission denied: change the directory's permissions or the path",
    errno.EPERM: "not permitted: change the directory's permissions or the path",
    errno.EIO: "the storage reports an input/output error",
    errno.ESTALE: "the network file system lost the file",
}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found, trusted or used; the message says what to change."""


def describe(error: BaseException) -> str:
    """One line for ``error``: what happened, where, and what to do about it."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        what = error.strerror or errno.errorcode.get(error.errno, "")
        return where + _ADVICE.get(error.errno, what)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def unwrap(error: CheckpointException, step: str) -> CheckpointError:
    """The one line behind an exception of torch.distributed.checkpoint."""
    causes = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
    rank = min(causes)
    return CheckpointError(f"while {step}: rank {rank}: {describe(causes[rank])}")


@contextmanager
def quiet(alone: bool) -> Iterator[None]:
    """Silence torch's warning about a save or load without communication, where it is meant."""
    if not alone:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
        yield
