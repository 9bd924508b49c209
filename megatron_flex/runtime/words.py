"""One voice a server: what its workers would all say alike is printed by the first who comes to it.

A wrong flag, a missing file or a bad plan ends every worker before the workers have met, so there
is no store in which they could agree who speaks. Yet a launcher ends all of them when the first has
ended: were the speaker chosen by rank, it would often be ended before it has read its flags. So
workers of one start and server share a file. It is locked while one prints, and lists what has
been printed; whoever finds its words there knows that they are on the screen, and can end.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_flex.runtime.attempt import ATTEMPT

PATIENCE = 2.0
"""Seconds to wait for another worker that is printing; words said twice are better than lost."""

KEEP = 24 * 3600.0
"""Seconds after which the file of an earlier start is removed."""

_START = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "SLURM_JOB_ID",
    "SLURM_STEP_ID", "SLURM_NODEID", "MASTER_ADDR", "MASTER_PORT", ATTEMPT,
)  # fmt: skip


def say_once(text: str, about: str | None = None) -> None:
    """Print ``text`` on standard error, unless another worker of this start and server has.

    Args:
        text: one or more lines, with or without a line break at their end.
        about: what is the same in the words of all workers; ``None``: ``text``.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        _print(text)
        return
    digest = hashlib.sha256((text if about is None else about).encode()).hexdigest()
    try:
        with _locked(_path(os.environ)) as file:
            lines = os.pread(file, 1 << 20, 0).decode(errors="replace").splitlines()
            began = _began()
            # What was said before this worker began belongs to an earlier start of the same name.
            if any(d == digest and float(t) >= began for t, d in map(str.split, lines)):
                return
            _print(text)
            os.write(file, f"{time.clock_gettime(time.CLOCK_BOOTTIME):.3f} {digest}\n".encode())
    except (OSError, ValueError):  # nobody to agree with: speak
        _print(text)


def _print(text: str) -> None:
    sys.stdout.flush()
    print(text.rstrip("\n"), file=sys.stderr, flush=True)


def _path(environment: Mapping[str, str]) -> Path:
    """The file of this start of the job on this server; its directory is made.

    Raises ``OSError`` if another user could reach into it.
    """
    values = [environment.get(name, "") for name in _START]
    if "SLURM_STEP_ID" not in environment or "TORCHELASTIC_RUN_ID" in environment:
        values.append(str(os.getppid()))  # torchrun, or the shell that started all workers
    directory = Path(tempfile.gettempdir()) / f"megatron-flex-words-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is not this user's own")
    for old in directory.iterdir():
        with suppress(FileNotFoundError):  # another worker has removed it
            if old.stat().st_mtime < time.time() - KEEP:
                old.unlink()
    return directory / hashlib.sha256("\0".join(values).encode()).hexdigest()[:24]


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """A descriptor of ``path``, which no other worker holds; the lock ends with its process."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
        yield file
    finally:
        os.close(file)


def _began() -> float:
    """When this process began, in seconds on the clock ``CLOCK_BOOTTIME``."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
