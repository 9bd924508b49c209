"""How a job ends when something fails: within seconds, and with the words of who failed first.

When one worker fails, its peers lose their connections moments later. Each would print an error,
and the one that matters would drown. So workers claim a failure in the job's key-value store: the
first says at once what happened and ends; the others leave the floor to it and the launcher.
Before the workers have met, :mod:`megatron_flex.runtime.words` sees to it that they speak once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from megatron_flex.runtime.words import say_once
from megatron_flex.signals import INTERRUPTED, about_a_path

if TYPE_CHECKING:
    import torch.distributed as dist

# Exit status of a worker that only lost its peers: the worker with the cause exits with another.
EXIT_PEER_LOST = 75  # EX_TEMPFAIL

GRACE = 2.0
"""Seconds that a worker which lost its peers leaves to the one with the cause, and to a launcher
that ends the others by itself. With neither, it ends by itself afterwards."""

LINGER = 1.0
"""Seconds that a failed worker waits if its process hosts the job's store, so that workers which
fail of the same cause hear of it."""

_KEY = "first failure"


class SaidElsewhere(SystemExit):
    """Another worker has said the same: this one ends with status 1, and prints nothing."""

    def __init__(self, words: str) -> None:
        super().__init__(1)
        self.words = words


class CommunicationError(RuntimeError):
    """A peer is gone or silent. The cause, if it is not this message, is in the peer's log."""


def lost(rank: int, what: object, error: RuntimeError) -> CommunicationError:
    """The error of worker ``rank`` whose wait for ``what`` failed in the communication library."""
    # gloo appends general advice to what happened.
    reason = str(error).partition(". This is typically")[0]
    return CommunicationError(f"worker {rank}: '{what}' failed: {reason}")


class FirstFailure:
    """Finds out which worker of the job failed first.

    Args:
        store: a client of the job's store that nothing else uses (a wait of another thread would
            block it); ``None`` for a job of one worker.
        rank: this worker.
        hosts: whether the store ends with this process.
    """

    def __init__(self, store: dist.Store | None, rank: int, *, hosts: bool = False) -> None:
        self._store = store
        self._rank = rank
        self._hosts = hosts

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Let an exception through at once if it is the job's first failure.

        Otherwise wait, and raise :class:`CommunicationError` that names the first failure, or
        :class:`SaidElsewhere` if another worker has said the same already.
        """
        try:
            yield
        except BaseException as error:
            if self._store is None or _is_no_failure(error):
                raise
            words = describe(error)
            lost_peer = isinstance(error, CommunicationError)
            rank, first = self._look() if lost_peer else self._claim(words)
            if rank == self._rank:
                if self._hosts:
                    time.sleep(LINGER)
                raise
            self._give_way()
            if first == words:
                raise SaidElsewhere(words) from error
            if first and lost_peer:
                raise CommunicationError(
                    f"worker {self._rank} ends because worker {rank} failed: {first}"
                ) from error
            raise

    def _claim(self, words: str) -> tuple[int, str]:
        """Rank and words of the first failure: this one, if there is none before it."""
        assert self._store is not None
        try:
            first = self._store.compare_set(_KEY, "", json.dumps([self._rank, words]))
            return tuple(json.loads(first))
        except RuntimeError:  # the store's host is gone: nobody can tell, so speak
            return self._rank, words

    def _look(self) -> tuple[int, str]:
        """Rank and words of the first failure; -1 if nobody said anything."""
        assert self._store is not None
        try:
            if self._store.check([_KEY]):
                return tuple(json.loads(self._store.get(_KEY)))
        except RuntimeError:
            pass
        return -1, ""

    @staticmethod
    def _give_way() -> None:
        """Leave the floor to the worker with the cause, and to the launcher."""
        # The launcher ends the other workers of a failed one with SIGTERM; that is no time to save.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(GRACE)


def describe(error: BaseException) -> str:
    """An exception in words: the message of an expected one, type and message of another."""
    if isinstance(error, SystemExit):
        return str(error)
    return (
        about_a_path(error) or "".join(traceback.format_exception_only(type(error), error)).strip()
    )


def run(main: Callable[[], None], hint: str = "") -> NoReturn:
    """Run a worker's ``main`` and end the process, at once if it failed.

    A failed worker leaves without waiting for the others (its peers' connections close, so they
    end too): destroying groups would wait for workers that wait for it. Status 0, 1, 130 after an
    interrupt, the ``SystemExit``'s own, or :data:`EXIT_PEER_LOST`. ``hint`` is said after Ctrl-C.
    """
    status, message = 0, ""
    try:
        main()
    except SaidElsewhere as end:
        # The launcher may report this worker nevertheless.
        status, message = 1, f"error: {end.words}"
    except SystemExit as end:
        if isinstance(end.code, str):
            status, message = 1, f"error: {end.code}"
            _speak(message)
        elif end.code:
            status = int(end.code)
            # Its words, if it has any, were printed where it was raised.
            message = f"error: {end}" if str(end) != str(end.code) else ""
    except CommunicationError as error:
        print(f"error: {error}", file=sys.stderr)
        status = EXIT_PEER_LOST
    except KeyboardInterrupt:
        say_once(f"interrupted{hint}")
        status = INTERRUPTED
    except BaseException as error:
        rank, words = os.environ.get("RANK", "0"), describe(error)
        status = 1
        if about_a_path(error):
            message = f"error: {words}"
            _speak(message)
        else:
            message = f"error in worker {rank}: {words} (its traceback is above)"
            _speak(f"error in worker {rank}:\n{traceback.format_exc()}", words)
    if status == 0:
        _leave_groups()
    elif message:
        _tell_launcher(message)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # it goes to a full disk, or nobody reads it
            stream.flush()
    os._exit(status)


def _speak(message: str, about: str | None = None) -> None:
    """Say why this worker ends, whatever a launcher does to the workers meanwhile."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say_once(message, about)


def _is_no_failure(error: BaseException) -> bool:
    regular = isinstance(error, SystemExit) and error.code in (None, 0)
    return regular or isinstance(error, KeyboardInterrupt)


def _leave_groups() -> None:
    """Leave the process groups in order, if there are any (without importing torch for it)."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _tell_launcher(message: str) -> None:
    """Leave the message where torchrun looks for it, so that its long report ends with it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    content = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
    try:
        with open(path, "w", encoding="utf-8") as stream:
            json.dump({"message": content}, stream)
    except OSError:
        pass  # the message was printed as well
