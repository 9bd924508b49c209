"""``--log-progress``: ``progress.txt`` beside the checkpoints, as Megatron-LM writes it."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

from megatron_flex.telemetry.files import GrowingFile

_TIME = "%Y-%m-%d %H:%M:%S"


class ProgressLog:
    """Appends one line when a job starts and one at each checkpoint.

    One worker owns it. Each line has the job's throughput, and that of all jobs with this number of
    workers since the last job with another number.

    Attributes:
        flops: floating-point operations of the run so far, earlier jobs included.
        tokens: tokens of the run so far, earlier jobs included.
    """

    def __init__(
        self, directory: str, world_size: int, *, flops: float = 0.0, tokens: int = 0
    ) -> None:
        """Write the line that starts a job.

        Args:
            directory: the ``--save`` directory.
            world_size: number of workers.
            flops: floating-point operations of earlier jobs, from the checkpoint.
            tokens: tokens of earlier jobs, from the checkpoint.
        """
        self.flops, self.tokens = flops, tokens
        self._path = Path(directory) / "progress.txt"
        self._world_size = world_size
        self._job_start = (time.time(), flops)
        self._first_start = earliest_start(self._path, world_size) or self._job_start
        self._append("Starting job")

    def iteration(self, flops: float, tokens: int) -> None:
        """Count one iteration."""
        self.flops += flops
        self.tokens += tokens

    def checkpoint(self, iteration: int, *, asynchronous: bool = False) -> None:
        """Write where the run is."""
        saved = "Saving async checkpoint" if asynchronous else "Saved checkpoint"
        self._append(
            f"{saved}\tIteration: {iteration}\t"
            f"Job throughput: {self._rate(*self._job_start):.1f} TFLOP/s/GPU\t"
            f"Cumulative throughput: {self._rate(*self._first_start):.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {self.flops:.2e}\t"
            f"Tokens (in billions): {self.tokens / 1e9:.2f}"
        )

    def _rate(self, start: float, flops: float) -> float:
        elapsed = max(time.time() - start, 1e-9)
        return (self.flops - flops) / (elapsed * 1e12 * self._world_size)

    def _append(self, text: str) -> None:
        stamp = datetime.now().strftime(_TIME)
        job = os.environ.get("SLURM_JOB_ID", "")
        file = GrowingFile(self._path, "--log-progress:")
        try:
            line = f"{stamp}\tJob ID: {job}\t# GPUs: {self._world_size}\t{text}\n"
            file.append(line.encode())
        finally:
            file.close()


def earliest_start(path: Path, world_size: int) -> tuple[float, float] | None:
    """When the first of the newest jobs with ``world_size`` workers started (seconds since the
    epoch), and the floating-point operations of the run until then."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    start: tuple[float, float] | None = None
    flops = 0.0
    for line in lines:
        fields = line.split("\t")
        try:
            workers = int(fields[2].partition(": ")[2])
            stamp = datetime.strptime(fields[0], _TIME).timestamp()
            if fields[3].startswith(("Saved checkpoint", "Saving async checkpoint")):
                flops = float(fields[7].partition(": ")[2])
        except (IndexError, ValueError):
            continue  # a torn or foreign line
        if workers != world_size:
            start = None
        elif start is None and fields[3] == "Starting job":
            start = (stamp, flops)
    return start
