"""Processes that work for a tool: answers, and nobody waits for one that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_flex.processes import ProcessDied, Processes, Step

ROOT = Path(__file__).resolve().parents[2]
LARGE = 1 << 22  # bytes: more than a pipe takes


def ready(step: Step) -> Callable[[str], Any]:
    """What a process does here."""

    def answer(word: str) -> Any:
        if word == "pid":
            return os.getpid()
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "leave":
            os._exit(3)
        if word == "fail":
            raise KeyError(word)
        if word == "large":
            step()
            return bytes(LARGE)
        if word == "sleep":
            step()
            time.sleep(1000)
        for _ in range(int(word)):
            step()
        return word

    return answer


def gone(pid: int) -> bool:
    """Whether a process ends within seconds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_answers_steps_and_errors() -> None:
    steps: list[int] = []
    with Processes(2, ready, lambda: steps.append(1)) as processes:
        words = [*map(str, range(20)), "fail", "3"]
        waiting = [processes.submit(word) for word in words]
        assert [f.result() for f in waiting[:20]] == words[:20]
        with pytest.raises(KeyError, match="fail") as error:
            waiting[20].result()
        assert "in answer" in str(error.value.__cause__)
        assert waiting[21].result() == "3"
    assert len(steps) == sum(range(20)) + 3


def test_one_that_dies_is_an_error_and_another_takes_its_place() -> None:
    with Processes(1, ready) as processes:
        dies, leaves, pid = map(processes.submit, ("die", "leave", "pid"))
        with pytest.raises(ProcessDied, match=r"killed by SIGKILL \(out of memory"):
            dies.result()
        with pytest.raises(ProcessDied, match="ended with status 3"):
            leaves.result()
        assert pid.result() != os.getpid()


def test_half_an_answer_is_an_error() -> None:
    """A queue that processes share would make its reader wait for the other half."""
    pids: list[int] = []

    def kill() -> None:
        time.sleep(0.2)  # its answer fills the pipe, which is not read meanwhile
        os.kill(pids[0], signal.SIGKILL)

    with Processes(1, ready, kill) as processes:
        pids.append(processes.submit("pid").result())
        with pytest.raises(ProcessDied, match="SIGKILL"):
            processes.submit("large").result(20)


def test_none_is_left_whatever_it_does(tmp_path: Path) -> None:
    busy: list[bool] = []
    with Processes(1, ready, lambda: busy.append(True)) as processes:
        pid = processes.submit("pid").result()
        processes.submit("sleep")
        later = processes.submit("1")
        while not busy:
            time.sleep(0.01)
    assert gone(pid)
    assert later.cancelled()


def test_none_outlives_a_parent_that_is_killed() -> None:
    script = (
        "from megatron_flex.processes import Processes\n"
        "from tests.unit.test_processes import ready\n"
        "import time\n"
        "if __name__ == '__main__':\n"
        "    with Processes(1, ready) as processes:\n"
        "        print(processes.submit('pid').result(), flush=True)\n"
        "        time.sleep(1000)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    assert gone(pid)
