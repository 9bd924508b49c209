"""A pool of gloo worker processes, started once and reused by all tests of a session.

Workers are forked from one server process that has imported torch and megatron-core already (five
seconds otherwise, for each worker). A job is a picklable function: it runs on ranks 0 to w-1 of a
fresh default process group and each rank's return value comes back. Every wait has a time-out.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

MAX_WORKERS = 6
PRELOAD = ["megatron_flex.training", "tests.distributed.pool"]
# After one rank failed, the others have this long (seconds) to notice it and stop by themselves.
_GRACE = 5.0


class WorkerError(RuntimeError):
    """A job failed. The message holds the first failing worker's own traceback."""

    def __init__(self, message: str, rank: int, kind: str) -> None:
        super().__init__(message)
        self.rank = rank
        #: Class name of the worker's exception, such as ``PlanError``.
        self.kind = kind


class WorkerTimeout(WorkerError):
    """A job did not end in time. The message says what each late worker was doing."""


class _Answer(NamedTuple):
    """What a worker sends back; ``moment`` is on the machine-wide monotonic clock, in seconds."""

    moment: float
    value: Any
    kind: str = ""
    trace: str = ""


class _Worker(NamedTuple):
    process: ForkServerProcess
    connection: Connection
    log: Path

    def kill(self) -> None:
        """End the worker and the processes it started."""
        pid = self.process.pid
        assert pid is not None
        for end in (lambda: os.killpg(pid, signal.SIGKILL), self.process.kill):
            try:
                end()
            except ProcessLookupError:
                pass
        self.process.join(10)
        self.connection.close()

    def tail(self, lines: int = 60) -> str:
        """The last lines that the worker wrote to its output and error streams."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class WorkerPool:
    """Runs jobs on up to :data:`MAX_WORKERS` processes; starts them when first asked for."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._directory = tempfile.TemporaryDirectory(prefix="workers-")
        self._store: dist.TCPStore | None = None
        self._jobs = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = 120.0,
        **keywords: Any,
    ) -> list[Any]:
        """Run ``function(*arguments, **keywords)`` on ``world_size`` ranks; the results by rank.

        The function finds its rank through ``torch.distributed`` (or RANK, WORLD_SIZE, LOCAL_RANK
        in its environment). ``timeout`` is in seconds. Raises :class:`WorkerError` with the first
        failing rank's traceback, :class:`WorkerTimeout` with the stacks of the ranks that hang.
        """
        self._start(world_size)
        self._jobs += 1
        if self._store is None:  # at a port that the kernel chooses; a file would be polled
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting = (self._store.port, f"job {self._jobs}")
        name = f"{function.__module__}.{function.__qualname__}"
        for rank, worker in enumerate(self._workers[:world_size]):
            job = (rank, world_size, meeting, timeout, function, arguments, keywords)
            _send(worker.connection, job)
        answers = self._collect(world_size, name, timeout)
        failed = [rank for rank, answer in answers.items() if answer.kind]
        if failed:
            first = min(failed, key=lambda rank: answers[rank].moment)
            raise WorkerError(
                f"rank {first} of {world_size} failed in {name}:\n{answers[first].trace}",
                first,
                answers[first].kind,
            )
        return [answers[rank].value for rank in range(world_size)]

    def close(self) -> None:
        """End all workers."""
        self._kill()
        self._store = None
        self._directory.cleanup()

    def _start(self, world_size: int) -> None:
        if not 1 <= world_size <= MAX_WORKERS:
            raise ValueError(f"a job runs on 1 to {MAX_WORKERS} workers, not {world_size}")
        for index in range(len(self._workers), world_size):
            log = Path(self._directory.name) / f"worker{index}.log"
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, str(log)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, log))

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _collect(self, world_size: int, name: str, timeout: float) -> dict[int, _Answer]:
        """Wait for all ranks. When some do not end, the pool is killed; the next job gets new."""
        ranks = {self._workers[rank].connection: rank for rank in range(world_size)}
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout
        while ranks:
            ready = wait(list(ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = ranks.pop(connection)
                answers[rank] = self._answer(rank, name)
                if answers[rank].kind:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        late = sorted(ranks.values())
        died = [rank for rank, answer in answers.items() if answer.kind == "WorkerDied"]
        if not late and not died:
            return answers
        stacks = self._stacks(late)
        self._kill()
        if not any(answer.kind for answer in answers.values()):
            raise WorkerTimeout(
                f"{name} on {world_size} workers did not end within {timeout:g} s; waited for"
                f" rank {', '.join(map(str, late))}.\n{stacks}",
                late[0],
                "WorkerTimeout",
            )
        return answers

    def _answer(self, rank: int, name: str) -> _Answer:
        worker = self._workers[rank]
        try:
            answer = _receive(worker.connection)
            assert isinstance(answer, _Answer)
            return answer
        except (EOFError, ConnectionResetError):
            worker.process.join(10)
            trace = f"the process ended with exit code {worker.process.exitcode} in {name}"
            # When it died is not known; the others' errors are what came of it.
            return _Answer(0.0, None, "WorkerDied", f"{trace}\n{worker.tail()}")

    def _stacks(self, ranks: list[int]) -> str:
        """Python stacks of workers that hang, newest call first."""
        texts = []
        for rank in ranks:
            worker = self._workers[rank]
            before = len(worker.log.read_text(errors="replace"))
            assert worker.process.pid is not None
            os.kill(worker.process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + 2.0
            text = ""
            while time.monotonic() < deadline and "_run_job" not in text:
                time.sleep(0.05)
                text = worker.log.read_text(errors="replace")[before:]
            texts.append(f"rank {rank}:\n{text}")
        return "\n".join(texts)


def _send(connection: Connection, value: object) -> None:
    # Not ``connection.send``: its pickler shares a tensor's memory, a descriptor for each, and what
    # tests keep to compare with would have taken a thousand.
    connection.send_bytes(pickle.dumps(value))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _serve(connection: Connection, log: str) -> None:
    """A worker's life: jobs until the pool closes the connection."""
    os.setsid()
    # The pool's own process may be killed; a worker in the middle of a job must not outlive it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # What was imported before stays for good: collecting after a job need not look through it.
    gc.freeze()
    while True:
        try:
            job = _receive(connection)
        except EOFError:
            return
        except Exception as error:  # a function or an argument that this process cannot import
            answer = _Answer(time.monotonic(), None, type(error).__name__, traceback.format_exc())
        else:
            answer = _run_job(*job)
        try:
            _send(connection, answer)
        except Exception as error:  # a result that cannot be pickled
            trace = traceback.format_exc()
            _send(connection, _Answer(time.monotonic(), None, type(error).__name__, trace))
        del answer  # its tensors would count as memory of the next job


def _run_job(
    rank: int,
    world_size: int,
    meeting: tuple[int, str],
    timeout: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> _Answer:
    """Run one job between setting up and clearing away all that a job may leave behind."""
    environment, directory, path = dict(os.environ), os.getcwd(), list(sys.path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    random.seed(rank)
    torch.manual_seed(rank)
    try:
        port, job = meeting
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(job, store),
            rank=rank,
            world_size=world_size,
            timeout=limit,
        )
        # A rank that were done already would cut off one that is still connecting.
        dist.barrier()
        return _Answer(time.monotonic(), function(*arguments, **keywords))
    except BaseException as error:
        return _Answer(time.monotonic(), None, type(error).__name__, traceback.format_exc())
    finally:
        parallel_state = sys.modules.get("megatron.core.parallel_state")
        if parallel_state is not None:
            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        sys.path[:] = path
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        if torch.are_deterministic_algorithms_enabled():  # the call loads the compiler: seconds
            torch.use_deterministic_algorithms(False)
        gc.collect()
