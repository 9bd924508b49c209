"""A thread's turns to copy: the manager says how many copy at a time, and who comes first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_flex.twinlayer.client import Client
from megatron_flex.twinlayer.errors import ManagerLost


class Turns:
    """The turns of one thread. ``lost`` is true once the manager has ended.

    They have a connection of their own: while it waits, the worker's other requests go on, and a
    turn ends with the process that has it.
    """

    def __init__(self, socket: Path, timeout: float) -> None:
        """``timeout``: seconds to wait for a turn; the copy runs without one then."""
        self._socket = socket
        self._timeout = timeout
        self._client: Client | None = None
        self.lost = False

    @contextmanager
    def turn(self, slab: int, size: int, *, background: bool = False) -> Iterator[None]:
        """Wait for the turn to copy ``size`` bytes of a slab, and have it during the block.

        ``background``: everything else comes first. Without a manager there is nothing to wait for.
        """
        self._request(f"TURN {int(background)} {slab} {size}")
        try:
            yield
        finally:
            self._request("DONE")

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()

    def _request(self, words: str) -> None:
        if self.lost:
            return
        try:
            if self._client is None:
                self._client = Client(self._socket, self._timeout)
            self._client.request(words)
        except ManagerLost:
            self.lost = True
