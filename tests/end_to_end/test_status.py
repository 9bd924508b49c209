"""The live view of a run in a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.browser import readable
from tests.end_to_end.processes import ROOT
from tests.unit.report.records import ONE, iteration, run_object, write_log


def seen(terminal: int, words: str, timeout: float = 60.0) -> bool:
    """Read what is drawn until it has some words."""
    text, deadline = "", time.monotonic() + timeout
    while words not in text and time.monotonic() < deadline:
        if readable(terminal, 0.2):
            text += os.read(terminal, 65536).decode(errors="replace")
    return words in text


def test_the_view_follows_the_run_until_it_is_interrupted(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [run_object(), iteration(1)])
    ours, theirs = pty.openpty()
    command = [sys.executable, "tools/status.py", str(tmp_path), "--interval", "0.05"]
    with subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs) as view:
        os.close(theirs)
        try:
            assert seen(ours, "iteration  1 of 100")
            with log.open("a") as file:
                file.write(json.dumps(iteration(2, plan=ONE)) + "\n")
            assert seen(ours, "(1,1) -> (2) at iteration 2")
            view.send_signal(signal.SIGINT)
            assert view.wait(30) == 0
        finally:
            view.kill()
            os.close(ours)
