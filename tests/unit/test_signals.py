"""Signals that come too early, and Ctrl-C as one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_flex.signals import INTERRUPTED, run_tool, withheld

CHILD = """
import signal, sys, time
from megatron_flex.signals import let
time.sleep(0.2)
let(signal.SIGTERM, signal.SIG_IGN)
print("alive", flush=True)
"""


def test_a_process_meets_no_signal_before_it_has_said_what_it_does_with_it() -> None:
    with withheld(signal.SIGTERM):
        child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
    with child:
        child.send_signal(signal.SIGTERM)
        assert child.communicate(timeout=30)[0] == b"alive\n"
    assert child.returncode == 0


def test_what_is_withheld_comes_afterwards() -> None:
    found: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: found.append(number))
    try:
        with withheld(signal.SIGUSR1):
            # Of the process, another thread would take it.
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            time.sleep(0.01)
            assert found == []
        assert found == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


WORKER = """
import os, sys, time
from megatron_flex.signals import end_with_torchrun
end_with_torchrun()
print(os.getpid(), flush=True)
time.sleep(1000)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize("name", ["torchrun", "launcher"])
def test_a_worker_ends_with_the_torchrun_that_started_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LAUNCHER)
    command = [sys.executable, str(tmp_path / name), WORKER]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with launcher:
        assert launcher.stdout is not None
        worker = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
        launcher.wait()
        if name == "torchrun":
            launcher.stdout.read()  # until the worker is gone, too
            return
        time.sleep(0.2)
        assert worker.status() == psutil.STATUS_SLEEPING
        worker.kill()


def test_what_the_output_cannot_show_ends_nothing() -> None:
    text = "\u2460 na\xefve \udcff"
    script = f"from megatron_flex.signals import any_text; any_text(); print({text!a})"
    for encoding in ("latin-1", "ascii", "utf-8"):
        found = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONIOENCODING": encoding},
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        assert found.stdout.strip() == text.encode(encoding, errors="backslashreplace")


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        run_tool(interrupted)
    assert end.value.code == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
    with pytest.raises(SystemExit) as end:
        run_tool(lambda: 3)
    assert end.value.code == 3
