"""The planner's process as the training loop sees it: ask, go on, take the answer later."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import megatron_flex
from megatron_flex.planner import frames
from megatron_flex.planner.messages import Answer, Done, Question, Setup, Task
from megatron_flex.signals import withheld


class PlannerGoneError(RuntimeError):
    """The planner's process has ended."""


class PlannerProcess:
    """One planner process. Not for several threads at once."""

    def __init__(self, setup: Setup) -> None:
        root = str(Path(megatron_flex.__file__).resolve().parents[1])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        # What ends a job tells all its processes, and this one while it still imports, too.
        with withheld(signal.SIGTERM):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_flex.planner.service"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                # Ctrl-C is for the workers, which may go on to save (--exit-signal-handler). The
                # end of the questions ends this process.
                start_new_session=True,
            )
        self._replies: queue.SimpleQueue[Answer | Done | None] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._unanswered = 0
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        for name, target, stream in (
            ("planner answers", self._read, self._process.stdout),
            # A pipe that nobody reads is full at 64 KiB: a process that is stopped must not stop
            # who asks.
            ("planner questions", self._write, self._process.stdin),
        ):
            threading.Thread(target=target, args=(stream,), name=name, daemon=True).start()
        self._asked.put(setup.to_json())

    @property
    def pid(self) -> int:
        """Process number."""
        return self._process.pid

    @property
    def unanswered(self) -> int:
        """Questions and tasks whose answers have not been taken."""
        return self._unanswered

    def ask(self, asked: Question | Task) -> None:
        """Put a question or a task; never waits. If the process has ended, :meth:`take` says so."""
        self._unanswered += 1
        self._asked.put(asked.to_json())

    def take(self, timeout: float) -> Answer | Done | None:
        """The next reply, ``None`` if there is none within ``timeout`` seconds.

        Raises :class:`PlannerGoneError`.
        """
        try:
            reply = (
                self._replies.get(timeout=timeout) if timeout > 0 else self._replies.get_nowait()
            )
        except queue.Empty:
            return None
        if reply is None:
            self._replies.put(None)  # for who asks again
            raise self._gone()
        # A question's programs, and a first answer, come on top of its answer.
        if not reply.first if isinstance(reply, Answer) else reply.asked:
            self._unanswered -= 1
        return reply

    def close(self) -> None:
        """End the process, at once: it keeps nothing."""
        self._asked.put(None)
        self._process.kill()
        self._process.wait()

    def _write(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(OSError):  # it has ended, and the answers too
            for data in iter(self._asked.get, None):
                frames.write(stream, data)  # type: ignore[arg-type]
        with contextlib.suppress(OSError):
            stream.close()

    def _read(self, stream: IO[bytes]) -> None:
        while (message := frames.read(stream)) is not None:  # type: ignore[arg-type]
            data, blob = message
            self._replies.put(
                Done.from_message(data, blob) if "task" in data else Answer.from_json(data)
            )
        self._replies.put(None)

    def _gone(self) -> PlannerGoneError:
        try:
            status = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            status = None
        return PlannerGoneError(f"the planner's process {self.pid} has ended (status {status})")
