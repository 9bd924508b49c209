"""The connection to the manager: requests as text, answers as JSON (kernels/twin/server.h)."""

from __future__ import annotations

import array
import contextlib
import json
import select
import socket
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_flex.twinlayer.errors import ManagerLost, TwinError

TIMEOUT = 60.0
"""Seconds for an answer; the manager takes microseconds."""


class Client:
    """One connection. Threads may share it."""

    def __init__(self, path: Path, timeout: float = TIMEOUT) -> None:
        """Raises :class:`ManagerLost` when nobody listens at ``path``."""
        self._path = path
        self._timeout = timeout
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise ManagerLost(f"no manager of host copies listens at {path}") from error

    def hello(self, attempt: str, rank: int, linger: float) -> tuple[int, dict[str, int]]:
        """Join the job as worker ``rank``; the arena's descriptor, and its measures.

        Another ``attempt`` than the one before says that all earlier workers are dead. ``linger``
        is how many seconds the manager waits for workers to come back when all have gone.
        """
        words = f"HELLO {attempt.replace(' ', '-')} {rank} {int(linger * 1000)}"
        descriptors: list[int] = []
        shape = self._exchange(words, descriptors)
        if len(descriptors) != 1:
            raise TwinError("the manager of host copies gave no arena: build it again")
        return descriptors[0], shape

    def request(self, words: str, lines: Iterable[str] = (), body: str = "") -> dict[str, Any]:
        """Ask, and wait for the answer.

        Raises :class:`TwinError` with the manager's words when it refuses, :class:`ManagerLost`
        when it has ended.
        """
        text = "\n".join((words, *lines))
        return self._exchange(text + ("\n" + body if body else ""), [])

    def ended(self) -> bool:
        """Whether the manager has closed the connection, without asking it anything."""
        if not self._lock.acquire(blocking=False):
            return False  # whoever is asking finds out
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0)) and self._socket.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):  # reset, or closed here
            return True
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _exchange(self, text: str, descriptors: list[int]) -> dict[str, Any]:
        data = text.encode()
        verb = text.split(maxsplit=1)[0]
        with self._lock:
            try:
                self._socket.sendall(struct.pack("<I", len(data)) + data)
                (length,) = struct.unpack("<I", self._receive(4, descriptors))
                answer = json.loads(self._receive(length, descriptors))
            except TimeoutError as error:
                self._socket.close()  # a late answer must not be taken for that of the next one
                raise ManagerLost(
                    f"the manager of host copies at {self._path} did not answer {verb} within"
                    f" {self._timeout:.0f} s"
                ) from error
            except (OSError, EOFError) as error:
                raise ManagerLost(
                    f"the manager of host copies at {self._path} has ended"
                ) from error
        if "error" in answer:
            raise TwinError(answer["error"])
        found: dict[str, Any] = answer
        return found

    def _receive(self, count: int, descriptors: list[int]) -> bytes:
        data = b""
        while len(data) < count:
            items = array.array("i")
            part, ancillary, _, _ = self._socket.recvmsg(
                count - len(data), socket.CMSG_SPACE(items.itemsize)
            )
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    items.frombytes(content[: items.itemsize])
                    descriptors.extend(items)
            if not part:
                raise EOFError
            data += part
        return data


def status_of(path: Path) -> dict[str, Any] | None:
    """What the manager at ``path`` holds; ``None`` when it is dead."""
    with contextlib.suppress(ManagerLost):
        client = Client(path, timeout=10.0)
        try:
            return client.request("STATUS")
        finally:
            client.close()
    return None
