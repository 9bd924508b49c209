"""Signals that come too early, and Ctrl-C as one line."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

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
