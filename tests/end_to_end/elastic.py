"""A job whose workers are started again when one dies, as ``torchrun --max-restarts`` does it.

Workers are forked as in :mod:`tests.end_to_end.processes`, so that an attempt starts in a second.
The launcher's part is played here: it holds the store, ends the others when one has died, and
starts all of them with the next number of the attempt.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from megatron_flex.twinlayer.client import status_of
from megatron_flex.twinlayer.location import DIRECTORY
from tests.end_to_end.processes import Job, agents_store


def short_directory(directory: Path) -> Path:
    """A new one beside a test's own: the path of a socket has 107 characters at most."""
    return Path(tempfile.mkdtemp(prefix="r", dir=directory.parent))


class Elastic:
    """Workers that run a script, again after each failure. Use it in a ``with`` statement.

    Attributes:
        attempts: attempts begun.
        runtime: the directory of the job's socket.
    """

    def __init__(
        self,
        directory: Path,
        script: str,
        argv: Sequence[str],
        *,
        size: int,
        max_restarts: int,
        runtime: Path | None = None,
        before: Callable[[int], None] | None = None,
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.runtime = runtime or short_directory(directory.parent)
        self.attempts = 0
        self._script, self._argv, self._size = script, list(argv), size
        self._max_restarts = max_restarts
        self._before = before
        self._store = agents_store()
        self._start()

    def _start(self) -> None:
        environment = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": str(self.attempts),
            "TORCHELASTIC_MAX_RESTARTS": str(self._max_restarts),
            DIRECTORY: str(self.runtime),
        }
        self._job = Job(self.directory).start(
            self._script,
            self._argv,
            size=self._size,
            port=self._store.port,
            environment=environment,
            before=self._before,
        )
        self.attempts += 1

    @property
    def processes(self) -> list[ForkServerProcess]:
        """The workers of the current attempt."""
        return self._job.processes

    def watch(self) -> int | None:
        """Do the launcher's part; the job's exit status when it has ended."""
        codes = [process.exitcode for process in self.processes]
        if all(code == 0 for code in codes):
            return 0
        failed = next((code for code in codes if code not in (None, 0)), None)
        if failed is None:
            return None
        self._end_workers(signal.SIGTERM)
        if self.attempts > self._max_restarts:
            return failed
        self._start()
        return None

    def run(self, timeout: float, until: Callable[[], bool] = lambda: False) -> int | None:
        """Do the launcher's part until the job ends (its status) or ``until()`` holds."""
        deadline = time.monotonic() + timeout
        while not until():
            status = self.watch()
            if status is not None:
                return status
            assert time.monotonic() < deadline, f"not done in {timeout:.0f} s:\n{self.output}"
            time.sleep(0.02)
        return None

    def kill(self, rank: int) -> bool:
        """``kill -9`` of a worker; whether it had not ended before."""
        process = self.processes[rank]
        if process.is_alive():
            process.kill()
        process.join(10)
        return process.exitcode == -signal.SIGKILL

    def managers(self) -> list[dict[str, Any]]:
        """What the job's managers say."""
        found = self.runtime.glob("*.sock") if self.runtime.exists() else ()
        return [status for path in found if (status := status_of(path)) is not None]

    @property
    def output(self) -> str:
        """What all workers printed so far, worker by worker."""
        return self._job.output

    def __enter__(self) -> Elastic:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_workers(signal.SIGKILL)

    def _end_workers(self, number: int) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(process.pid, number)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(10)


def losses(path: Path) -> dict[int, list[float]]:
    """Loss and gradient norm of every iteration in a log of ``--log-jsonl``."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the writer was killed in the middle
            continue
        if record["event"] == "iteration":
            found[record["iteration"]] = [record["lm loss"], record["grad_norm"]]
    return found


def assert_nothing_is_left(runtime: Path, timeout: float = 10.0) -> None:
    """No socket in the directory, and no process that served one there."""
    deadline = time.monotonic() + timeout
    while left := [*runtime.glob("*"), *_serving(runtime)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def _serving(runtime: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"{runtime}/" in words:
            found.append(words.replace("\0", " "))
    return found
