"""Messages that were sent: their buffers are kept until they are delivered, and no longer.

A send of gloo is not done before somebody has waited for it. A thread of its own does, so that the
memory goes as soon as the peer has taken the message, and not at the end of the iteration. Nothing
but waiting happens there, without the interpreter's lock.
"""

from __future__ import annotations

import queue
import threading
from collections import deque

import torch
import torch.distributed as dist

from megatron_flex.runtime.channel import Message
from megatron_flex.runtime.failure import CommunicationError, lost
from megatron_flex.runtime.world import World

_Sent = tuple[object, torch.Tensor, Message]


class Deliveries:
    """The sends of one worker on their way, waited for in order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: deque[_Sent] = deque()  # where a send says by itself that it is done
        self._queue: queue.SimpleQueue[_Sent | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: CommunicationError | None = None

    def add(self, what: object, tensor: torch.Tensor, work: Message) -> None:
        """Keep ``tensor`` until ``work`` is done. ``what`` names the message in errors."""
        if self._error is not None:
            raise self._error
        if self._world.device.type == "cuda" and dist.get_backend() != "gloo":
            self._open.append((what, tensor, work))
            while self._open and self._open[0][2].is_completed():
                self._open.popleft()
            return
        if self._thread is None:
            # A worker that fails must not wait for it.
            self._thread = threading.Thread(target=self._deliver, name="deliveries", daemon=True)
            self._thread.start()
        self._queue.put((what, tensor, work))

    def finish(self) -> None:
        """Wait until everything is delivered. Raises ``CommunicationError`` that names a message
        that was not."""
        while self._open:
            self._wait(self._open.popleft())
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _deliver(self) -> None:
        while True:
            sent = self._queue.get()
            if sent is None:
                return
            if self._error is None:
                try:
                    self._wait(sent)
                except CommunicationError as error:
                    self._error = error
            del sent

    def _wait(self, sent: _Sent) -> None:
        what, _, work = sent
        try:
            work.wait(self._world.timeout)
        except RuntimeError as error:
            limit = f"{what} (time-out {self._world.timeout.total_seconds():.0f} s)"
            raise lost(self._world.process, limit, error) from error
