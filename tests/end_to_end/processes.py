"""Real workers for tests: the entry points as processes of their own, with their exit statuses.

They are forked from a server that has imported torch and megatron-core already, so a job starts in
a second instead of ten. Everything else is as under torchrun, which holds the key-value store, or
as under srun, where the first worker holds it: one process a worker, which finds its place in the
environment and ends by itself.
"""

from __future__ import annotations

import multiprocessing
import os

# As entry.py, which comes too late for workers that have imported torch.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch.distributed as dist

from tests.distributed.pool import PRELOAD
from tests.ports import held_port

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Job:
    """Workers that run a script, and what they printed.

    Use it in a ``with`` statement: at its end no worker is left.
    """

    directory: Path
    processes: list[ForkServerProcess] = field(default_factory=list)
    port: int = 0
    _store: dist.TCPStore | None = None
    _held: socket.socket | None = None

    def start(
        self,
        script: str,
        argv: Sequence[str],
        *,
        size: int = 1,
        port: int | None = None,
        agent: bool = True,
        environment: Mapping[str, str] | None = None,
        delays: Sequence[float] = (),
        before: Callable[[int], None] | None = None,
        directory: Path = ROOT,
    ) -> Job:
        """Start ``size`` workers.

        Args:
            port: where another holds the store already; by default one that is free.
            agent: hold the store here, as torchrun does, else the first worker does.
            environment: further variables.
            delays: worker ``i`` begins ``delays[i]`` seconds late.
            before: called with the rank before the script runs, to break something.
            directory: where the workers run.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)  # the pool's server, if it runs already
        self.directory.mkdir(parents=True, exist_ok=True)
        meeting: dict[str, str] = {}
        if size > 1:
            if port is not None:
                self.port = port
            elif agent:
                self._store = agents_store()
                self.port = self._store.port
                meeting["TORCHELASTIC_USE_AGENT_STORE"] = "True"
                meeting["TORCHELASTIC_RESTART_COUNT"] = "0"
            else:
                self._held = held_port()
                self.port = self._held.getsockname()[1]
            meeting |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        for rank in range(size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            place["TORCHELASTIC_ERROR_FILE"] = str(self.error_file(rank))
            late = delays[rank] if rank < len(delays) else 0.0
            values = place | meeting | dict(environment or {})
            arguments = (
                script,
                list(argv),
                values,
                str(self.log(rank)),
                late,
                before,
                str(directory),
            )
            process = context.Process(target=_worker, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)
        return self

    def log(self, rank: int) -> Path:
        """Standard output and error of a worker."""
        return self.directory / f"worker{rank}.log"

    def error_file(self, rank: int) -> Path:
        """Where torchrun would look for a worker's message."""
        return self.directory / f"error{rank}.json"

    def text(self, rank: int) -> str:
        """What a worker printed so far."""
        path = self.log(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def output(self) -> str:
        """What all workers printed so far."""
        return "".join(self.text(rank) for rank in range(len(self.processes)))

    def wait(self, timeout: float = 60.0) -> list[int]:
        """Exit status of each worker, negative for a signal; a failure if one does not end."""
        deadline = time.monotonic() + timeout
        for rank, process in enumerate(self.processes):
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, (
                f"worker {rank} still runs after {timeout:.0f} s; it printed:\n{self.text(rank)}"
            )
        return [process.exitcode or 0 for process in self.processes]

    def wait_for(self, words: str, rank: int, timeout: float = 60.0) -> None:
        """Wait until a worker has printed ``words``."""
        deadline = time.monotonic() + timeout
        while words not in self.text(rank):
            assert self.processes[rank].is_alive(), f"worker {rank} ended:\n{self.text(rank)}"
            assert time.monotonic() < deadline, (
                f"no '{words}' from worker {rank} in {timeout:.0f} s"
            )
            time.sleep(0.02)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a worker."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        self._store = None
        if self._held is not None:
            self._held.close()


def agents_store() -> dist.TCPStore:
    """The store that a launcher holds, at a port that the kernel chose."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _worker(
    script: str,
    argv: list[str],
    environment: dict[str, str],
    log: str,
    late: float,
    before: Callable[[int], None] | None,
    directory: str,
) -> None:
    """A worker's life: what ``python script argv`` would do."""
    import ctypes
    import runpy
    import warnings

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the tests
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)  # as Python itself
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(environment)
    os.chdir(directory)
    time.sleep(late)
    if before is not None:
        before(int(environment["RANK"]))
    sys.argv = [script, *argv]
    runpy.run_path(str(ROOT / script), run_name="__main__")
