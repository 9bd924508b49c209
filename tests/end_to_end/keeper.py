"""Keeps servers for a test, and ends them and whatever came of them when the test is no more.

A program of its own, without imports from the tests. It starts what it reads from its standard
input, one JSON object a line (``argv``, ``log``), and answers with the process's number. When the
input ends, be it that the test was killed, it kills all its descendants: those that left their
parents, too, since they become its own children (``PR_SET_CHILD_SUBREAPER``). Then it removes the
directory that its first argument names.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_SUBREAPER = 36


def descendants() -> list[int]:
    """Processes whose parents, or theirs, are this one."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = entry.read_text(errors="replace").partition(" (")
            parents[int(number)] = int(rest.rpartition(") ")[2].split()[1])
    found, new = [], [os.getpid()]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def kill_all() -> None:
    """End all descendants; those that appear meanwhile, too."""
    while left := descendants():
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        reap()
        time.sleep(0.01)


def reap(*_: object) -> None:
    """Take note of children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """Serve until standard input ends."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, reap)
    try:
        for line in sys.stdin:
            wanted = json.loads(line)
            with open(wanted["log"], "ab") as log:
                started = subprocess.Popen(
                    wanted["argv"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    restore_signals=True,
                    preexec_fn=lambda: [signal.signal(n, signal.SIG_DFL) for n in (2, 15, 1)],
                )  # fmt: skip
            print(started.pid, flush=True)
            started.returncode = 0  # reaped above
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kill_all()
        shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
