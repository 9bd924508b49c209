"""Starts the manager: a process of its own session that outlives the workers."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_flex.twinlayer.client import Client, status_of
from megatron_flex.twinlayer.errors import ManagerLost, TwinError

PROGRAM = Path(__file__).resolve().parents[1] / "twin_manager"

PATIENCE = 300.0
"""Seconds for which a manager waits for workers, to come or to come back."""

AT_ONCE = 2
"""Copies that run at a time on a server, so many as fill its memory. With GPUs, one for each: it is
the links to them that are full."""

_ENDING = 60.0  # seconds
_PAGE = 4096
_FLAGS_OF = 64 << 10  # bytes; kernels/twin/layout.h: the smallest chunk
_ZEROING = 0.5e9  # bytes a second; much slower than any machine takes new memory


@dataclass(frozen=True)
class Shape:
    """What the arena holds, in bytes.

    ``banks`` versions of all slabs that workers of this server own, of ``bank_bytes`` each, and
    ``room_bytes`` for slabs on their way from one worker to another.
    """

    banks: int
    bank_bytes: int
    room_bytes: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return _PAGE + self.banks * _pages(self.bank_bytes) + _pages(self.room_bytes)


def entry_bytes(size: int) -> int:
    """What a slab's state of ``size`` bytes takes in the arena: itself, its header and flags."""
    return _pages(64 + 8 * -(-size // _FLAGS_OF)) + _pages(size)


def start(
    socket: Path, job: str, shape: Shape, patience: float = PATIENCE, at_once: int = AT_ONCE
) -> bool:
    """Start a manager that serves ``socket``; ``False`` if one does already.

    Returns when it has its memory. ``job`` is for people; ``at_once`` copies run at a time. Raises
    :class:`TwinError` that says why it cannot run.
    """
    if not PROGRAM.exists():
        raise TwinError(
            f"the manager of host copies {PROGRAM} is missing: run `make native` in the source"
            " tree, or install the package again with `pip install .`"
        )
    words = {
        "--socket": socket,
        "--job": job,
        "--banks": shape.banks,
        "--bank-bytes": shape.bank_bytes,
        "--room-bytes": shape.room_bytes,
        "--patience": int(patience * 1000),
        "--at-once": at_once,
    }
    command = [str(PROGRAM), *(str(word) for pair in words.items() for word in pair)]
    limit = min(60.0 + shape.bytes / _ZEROING, 3600.0)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=limit, check=False
        )
    except OSError as error:
        raise TwinError(
            f"the manager of host copies {PROGRAM} cannot be started ({error.strerror}): build it"
            " again with `make native` or `pip install .`"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise TwinError(
            f"the manager of host copies was not ready within {limit:.0f} s: the machine may be"
            " swapping; give --flexpipe-no-twin"
        ) from error
    word, _, rest = done.stdout.decode(errors="replace").strip().partition(" ")
    if word not in ("ready", "exists"):
        raise TwinError(f"the manager of host copies cannot run: {rest or 'it gave no answer'}")
    return word == "ready"


def stop(socket: Path) -> bool:
    """End the manager at ``socket`` and wait until it is gone; whether there was one."""
    status = status_of(socket)
    if status is None:
        return False
    try:
        client = Client(socket)
        client.request("END")
        client.close()
    except ManagerLost:
        pass
    deadline = time.monotonic() + _ENDING
    while socket.exists() or _runs(status["pid"]):
        if time.monotonic() > deadline:
            raise TwinError(
                f"the manager of host copies (process {status['pid']}) did not end within"
                f" {_ENDING:.0f} s: end it"
            )
        time.sleep(0.005)
    return True


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # What waits to be reaped has given its memory back.
    return stat.rpartition(")")[2].split()[0] != "Z"


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
