"""Managers of real processes, each in a directory of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_flex.twinlayer.client import status_of
from megatron_flex.twinlayer.location import socket_of
from megatron_flex.twinlayer.manager import Shape, start
from megatron_flex.twinlayer.worker import Member, TwinLayers

JOB = "none at 127.0.0.1:29500"
CPU = torch.device("cpu")


@contextmanager
def manager(shape: Shape, job: str = JOB, patience: float = 30.0) -> Iterator[Path]:
    """The socket of a manager that is killed at the end, if it lives then."""
    socket = socket_of(job)
    assert start(socket, job, shape, patience)
    pid = status(socket)["pid"]
    try:
        yield socket
    finally:
        if running(pid):
            os.kill(pid, signal.SIGKILL)
        socket.unlink(missing_ok=True)


def join(
    socket: Path,
    rank: int = 0,
    *,
    attempt: str = "attempt 0.0",
    linger: float = 30.0,
    timeout: float = 10.0,
) -> TwinLayers:
    """A worker that has joined."""
    return TwinLayers(socket, Member(rank, attempt, 2, linger, timeout), CPU)


def status(socket: Path) -> dict[str, Any]:
    """What the manager says; it must live."""
    found = status_of(socket)
    assert found is not None, "the manager has ended"
    return found


def running(pid: int) -> bool:
    """Whether a process lives."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int, socket: Path, timeout: float = 30.0) -> None:
    """The process and its socket are gone in time."""
    deadline = time.monotonic() + timeout
    while running(pid) or socket.exists():
        assert time.monotonic() < deadline, f"process {pid} or {socket} is still there"
        time.sleep(0.01)
