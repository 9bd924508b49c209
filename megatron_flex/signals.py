"""Signals to programs of several processes: Ctrl-C is one line, and a process meets none too early.

A process starts with the signals blocked that the thread which starts it has blocked: so none
reaches it before it has said what it does with them.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a shell's command."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TORCHRUN = (b"torchrun", b"torch.distributed.run", b"torch.distributed.launch")


@contextmanager
def withheld(*numbers: signal.Signals) -> Iterator[None]:
    """Processes that are started in here do not get these signals until they call :func:`let`.

    Those for this process come when it ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let(number: signal.Signals, handler: signal.Handlers) -> None:
    """What this process does with a signal from now on, one that was withheld included."""
    signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])


def end_quietly() -> None:
    """For a process of a pool: Ctrl-C ends it without a word, where it ends its parent at all."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        let(signal.SIGINT, signal.SIG_DFL)


def end_with_torchrun() -> None:
    """This process gets SIGTERM when the torchrun that has started it is gone, killed itself.

    Else workers would train on to their end, and nobody could tell them to stop but one by one.
    Where another program is between the two nothing is done: the system means the thread that has
    started a process, and a profiler's may end long before its process does.
    """
    parent = os.getppid()
    with suppress(OSError, AttributeError):
        words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
        if any(word.rpartition(b"/")[2] in _TORCHRUN for word in words):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it went meanwhile
                signal.raise_signal(signal.SIGTERM)


def any_text() -> None:
    """What this process prints may have characters that the encoding of its output lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def about_a_path(error: BaseException) -> str | None:
    """What to do about a path that this user may not use, or that is too long; else ``None``."""
    if not isinstance(error, OSError) or error.filename is None:
        return None
    advice = {errno.EACCES: "give one that this user may use", errno.ENAMETOOLONG: "give another"}
    if error.errno not in advice:
        return None
    return f"{error.filename}: {error.strerror}: {advice[error.errno]}"


def plain_warnings() -> None:
    """Warnings of this process are lines for people from now on; ours come once each."""
    said: set[object] = set()

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        key = str(message) if category.__module__ == "builtins" else category
        if key not in said:
            said.add(key)
            print(f"warning: {message}", file=sys.stderr, flush=True)

    warnings.showwarning = show


def run_tool(main: Callable[[], int]) -> NoReturn:
    """Run a tool's ``main`` and end the process with its status; Ctrl-C is one line, as is a path
    that cannot be used."""
    any_text()
    plain_warnings()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except OSError as error:
        if (words := about_a_path(error)) is None:
            raise
        sys.exit(f"error: {words}")
