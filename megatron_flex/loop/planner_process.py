"""The planner's process as the training loop sees it: ask, go on, take the answer later."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import megatron_flex
from megatron_flex.planner.service import Answer, Question, Setup


class PlannerGoneError(RuntimeError):
    """The planner's process has ended."""


class PlannerProcess:
    """One planner process. Not for several threads at once."""

    def __init__(self, setup: Setup) -> None:
        root = str(Path(megatron_flex.__file__).resolve().parents[1])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_flex.planner.service"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self._process.stdout is not None
        reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), name="planner answers", daemon=True
        )
        reader.start()
        self._write(setup.to_json())

    @property
    def pid(self) -> int:
        """Process number."""
        return self._process.pid

    def ask(self, question: Question) -> None:
        """Put a question. Raises :class:`PlannerGoneError`."""
        self._write(question.to_json())

    def take(self, timeout: float) -> Answer | None:
        """The next answer, ``None`` if there is none within ``timeout`` seconds.

        Raises :class:`PlannerGoneError`.
        """
        try:
            line = self._answers.get(timeout=timeout) if timeout > 0 else self._answers.get_nowait()
        except queue.Empty:
            return None
        if line is None:
            raise self._gone()
        return Answer.from_json(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(2.0)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._gone() from error

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._answers.put(line)
        self._answers.put(None)

    def _gone(self) -> PlannerGoneError:
        try:
            status = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            status = None
        return PlannerGoneError(f"the planner's process {self.pid} has ended (status {status})")
