"""Processes of one machine that work for a tool, none of which can make it wait when it dies.

Each has a pipe of its own, whose other end closes with the process. The queues that the processes
of :mod:`concurrent.futures` share may be left locked, or with half an answer, by one that is killed
(out of memory, say), and whoever reads them then waits for ever; and they keep processes alive
whose parent was killed.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from megatron_flex.signals import end_quietly, withheld

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Step = Callable[[], object]
Make = Callable[[Step], Callable[[Asked], Answer]]
"""Makes a process ready: given what it calls for each step done, returns what answers."""

_STEP, _DONE, _FAILED = range(3)


class ProcessDied(RuntimeError):
    """A process ended before it had answered; the message says how."""


class Processes(Generic[Asked, Answer]):
    """Up to ``number`` processes, each of which answers one question at a time.

    Use it in a ``with`` statement: at its end no process is left, whatever it was doing. Processes
    are started anew, so ``make``, questions and answers are pickled.

    Args:
        number: processes at a time; each begins with the first question that finds none idle.
        make: called once in each.
        step: called here for each step that one of them has done, in threads, but once at a time.
    """

    def __init__(self, number: int, make: Make[Asked, Answer], step: Step = lambda: None) -> None:
        self._make, self._step = make, step
        self._threads = ThreadPoolExecutor(number, "process")
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        for _ in range(number):
            self._idle.put(None)  # not started
        self._started: list[_Process] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, asked: Asked) -> Future[Answer]:
        """The answer, when it is there; what was raised in the process; or :class:`ProcessDied`."""
        return self._threads.submit(self._ask, asked)

    def _ask(self, asked: Asked) -> Answer:
        process = self._idle.get()
        try:
            process = process or self._start()
            kind, value = process.ask(asked, self._one_step)
        except BaseException:
            process = None  # what it may say later answers nothing: another takes its place
            raise
        finally:
            self._idle.put(process)
        if kind == _FAILED:
            error, text = value
            raise error from RuntimeError(f"in another process:\n{text}")
        answer: Answer = value
        return answer

    def _one_step(self) -> None:
        with self._lock:
            self._step()

    def _start(self) -> _Process:
        with self._lock:
            if self._closed:
                raise ProcessDied("no process is started any more")
            self._started.append(_Process(self._make))
            return self._started[-1]

    def __enter__(self) -> Processes[Asked, Answer]:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._started:
            process.end()
        self._threads.shutdown()


class _Process:
    """One of them, with this end of its pipe."""

    def __init__(self, make: Make[Any, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        with withheld(signal.SIGINT):
            self._process.start()
        theirs.close()

    def ask(self, asked: Any, step: Step) -> tuple[int, Any]:
        """What it says last, and of which kind that is."""
        try:
            self._pipe.send(asked)
            while True:
                kind, value = self._pipe.recv()
                if kind != _STEP:
                    return kind, value
                step()
        except (EOFError, OSError) as error:
            raise ProcessDied(self._death()) from error

    def _death(self) -> str:
        self._process.join(1.0)
        status = self._process.exitcode
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
            memory = " (out of memory?)" if status == -signal.SIGKILL else ""
            return f"a worker process {how}{memory}"
        return f"a worker process ended with status {status}"

    def end(self) -> None:
        """Whatever it does: it keeps nothing that another needs."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, make: Make[Any, Any]) -> None:
    """A process's life: it ends with the other end of its pipe."""
    end_quietly()
    answer: Callable[[Any], Any] | None = None
    with suppress(EOFError, ConnectionError):
        while True:
            asked = pipe.recv()
            try:
                if answer is None:
                    answer = make(lambda: pipe.send((_STEP, None)))
                said = _DONE, answer(asked)
            except Exception as error:
                said = _FAILED, (error, traceback.format_exc())
            pipe.send(said)
