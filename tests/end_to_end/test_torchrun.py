"""Under the real torchrun: whose error is shown last, and what a stop leaves behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from megatron_flex.checkpoint.layout import latest
from megatron_flex.checkpoint.load import verify
from tests.end_to_end.processes import ROOT

FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 128 --mock-data"
    " --vocab-size 90 --micro-batch-tokens 128 --global-batch-size 4 --lr 1e-3 --log-interval 1"
    " --distributed-backend gloo --pipeline-model-parallel-size 2 --train-iters 100000"
    " --save-interval 100000 --exit-signal-handler"
)


@contextmanager
def launched(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Two workers under torchrun, which have trained an iteration; nothing is left afterwards."""
    log = directory / "log"
    environment = {**os.environ, "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(ROOT / "pretrain_gpt.py"), *FLAGS]
    command += ["--save", str(directory / "saved")]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment)
    try:
        deadline = time.monotonic() + 120
        while "iteration        1/" not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the workers did not start"
            time.sleep(0.1)
        workers = psutil.Process(process.pid).children(recursive=True)
        yield process, log
        assert process.wait(60) is not None
        assert not [w for w in workers if w.is_running() and w.status() != psutil.STATUS_ZOMBIE]
    finally:
        process.kill()
        process.wait(10)


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The workers, by rank."""
    children = psutil.Process(process.pid).children()
    named = {int(c.environ()["RANK"]): c for c in children if "RANK" in c.environ()}
    return [named[rank] for rank in sorted(named)]


def test_a_killed_worker_is_the_root_cause_that_is_reported(tmp_path: Path) -> None:
    with launched(tmp_path) as (process, log):
        start = time.monotonic()
        workers_of(process)[1].send_signal(signal.SIGKILL)
        assert process.wait(60) == 1
        assert time.monotonic() - start < 30
    report = log.read_text()
    cause = report[report.index("Root Cause") :]
    assert re.search(r"rank +: 1 ", cause)
    assert "Signal 9 (SIGKILL)" in cause
    assert "error in worker" not in report, "the other worker leaves the floor to the launcher"
    assert latest(tmp_path / "saved") is None


def test_torchrun_that_is_stopped_lets_its_workers_save(tmp_path: Path) -> None:
    with launched(tmp_path) as (process, log):
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    text = log.read_text()
    assert "exiting program after receiving SIGTERM." in text
    saved = latest(tmp_path / "saved")
    assert saved is not None
    assert f"successfully saved checkpoint from iteration {saved:7d}" in text
    verify(tmp_path / "saved")
