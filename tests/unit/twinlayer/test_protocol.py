"""Whatever a worker sends, the manager lives: random requests under AddressSanitizer."""

from __future__ import annotations

import random
import socket as sockets
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.build import configure_and_build
from megatron_flex.twinlayer.client import Client
from megatron_flex.twinlayer.errors import TwinError
from megatron_flex.twinlayer.manager import Shape
from tests.unit.twinlayer.managers import manager, status, wait_until_gone

BUILDS = Path(__file__).resolve().parents[3] / "build"
VERBS = ("HELLO", "LIST", "ADOPT", "BEGIN", "COMMON", "HANDOVER", "STATUS", "")


@pytest.fixture
def sanitized(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Managers are those of a build with AddressSanitizer; the prefix of what it reports."""
    directory = BUILDS / "address"
    options = {"MFLEX_CUDA": "OFF", "MFLEX_TESTS": "ON", "MFLEX_SANITIZE": "address"}
    configure_and_build(directory, options | {"MFLEX_WERROR": "ON"}, ("twin_manager",))
    monkeypatch.setattr("megatron_flex.twinlayer.manager.PROGRAM", directory / "twin_manager")
    monkeypatch.setenv("ASAN_OPTIONS", f"log_path={tmp_path / 'report'}")
    return tmp_path / "report"


def request(rng: random.Random) -> bytes:
    """A request, a broken one, or noise."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randint(0, 40))

    def number() -> str:
        return str(rng.choice([0, 1, 2, 3, rng.randint(0, 10**6), 10**17, 10**30, "x", "-1", ""]))

    lines = [" ".join([rng.choice(VERBS), *(number() for _ in range(rng.randint(0, 3)))])]
    for _ in range(rng.randint(0, 5)):
        lines.append(" ".join(number() for _ in range(rng.randint(1, 5))))
    return "\n".join(lines).encode()


def test_random_requests_are_answered_and_break_nothing(
    sanitized: Path, count: Callable[[int, int], int]
) -> None:
    rng = random.Random(1)
    with manager(Shape(2, 1 << 20, 1 << 20)) as socket:
        pid = status(socket)["pid"]
        worker = Client(socket)  # while it is there, no HELLO makes the manager leave
        worker.hello("b", 0, 60.0)
        for _ in range(count(20, 1000)):
            with sockets.socket(sockets.AF_UNIX) as raw:
                raw.settimeout(20.0)
                raw.connect(str(socket))
                hello = b"HELLO a 0 60000"
                for words in (hello, *(request(rng) for _ in range(20))):
                    raw.sendall(struct.pack("<I", len(words)) + words)
                    (length,) = struct.unpack("<I", raw.recv(4, sockets.MSG_WAITALL))
                    assert raw.recv(length, sockets.MSG_WAITALL).startswith(b"{")
                raw.sendall(rng.randbytes(rng.randint(0, 8)))  # and goes in the middle of a frame
        assert worker.request("STATUS")["pid"] == pid
        with pytest.raises(TwinError):
            worker.request("NONSENSE")
        worker.request("END")
        wait_until_gone(pid, socket)
    assert not list(sanitized.parent.glob("report*")), next(
        sanitized.parent.glob("report*")
    ).read_text()
