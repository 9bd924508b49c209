"""Jobs of several workers that share the GPUs of this machine, as processes of their own.

Not forked, since CUDA does not survive a fork.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.end_to_end import runs
from tests.ports import held_port

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 150.0
"""Longest time of a job."""


def flags_of(directory: Path, iterations: int, more: str = "") -> list[str]:
    """Of a training on documents that are written to ``directory``."""
    prefix = runs.write_documents(directory / "text")
    # Kernels with keyed attention dropout are for the CPU only; hidden dropout stays on.
    words = f"--data-path {prefix} --split 1,0,0 --train-iters {iterations} --attention-dropout 0"
    return [*runs.MODEL, *runs.TRAINING, *shlex.split(f"{words} {more}")]


def losses_on_the_cpu(directory: Path, flags: Sequence[str], iterations: int) -> list[float]:
    """Those of one worker."""
    with Launch(directory, flags, gpu=False) as job:
        job.wait(SECONDS)
        assert len(job.losses()) == iterations
        return job.losses()


class Launch:
    """Workers that run ``pretrain_gpt.py``; use it in a ``with`` statement.

    ``gpu`` of false hides the GPUs from them. ``attempt`` above 0 says that the workers of an
    earlier attempt, which met at the same ``port``, have died.
    """

    def __init__(
        self,
        directory: Path,
        flags: Sequence[str],
        *,
        size: int = 1,
        gpu: bool = True,
        port: int | None = None,
        attempt: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._held = held_port() if port is None else None
        self.port = self._held.getsockname()[1] if self._held is not None else port
        self.log = directory / "log.jsonl"
        self._output = [directory / f"worker{rank}.{attempt}" for rank in range(size)]
        shared = {
            **os.environ,
            **(environment or {}),
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": "1",
        }
        if not gpu:
            shared["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, "--log-jsonl"]
        self.processes = []
        for rank, path in enumerate(self._output):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with path.open("w") as output:
                self.processes.append(
                    subprocess.Popen(
                        [*command, str(self.log)],
                        env={**shared, **own},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                    )
                )

    def wait(self, timeout: float) -> None:
        """Until all have ended well, within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process in self.processes):
            assert time.monotonic() < deadline, f"not done in {timeout:.0f} s:\n{self.output}"
            time.sleep(0.05)
        codes = [process.returncode for process in self.processes]
        assert not any(codes), f"exit codes {codes}:\n{self.output}"

    def until(self, iteration: int, timeout: float) -> None:
        """Until ``iteration`` is in the log."""
        deadline = time.monotonic() + timeout
        while max((r["iteration"] for r in self.iterations()), default=0) < iteration:
            ended = [process.poll() for process in self.processes]
            assert not any(ended), f"exit codes {ended}:\n{self.output}"
            assert time.monotonic() < deadline, f"not there in {timeout:.0f} s:\n{self.output}"
            time.sleep(0.02)

    def iterations(self) -> list[dict[str, Any]]:
        """What the log has of each iteration so far."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [record for record in records if record["event"] == "iteration"]

    def losses(self) -> list[float]:
        """The loss of each iteration."""
        return [record["lm loss"] for record in self.iterations()]

    @property
    def output(self) -> str:
        """The end of what each worker printed."""
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in self._output)

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(10)
        if self._held is not None:
            self._held.close()
