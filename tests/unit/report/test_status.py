"""The live view of a run: what it says, and that it follows a growing file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_flex.report.status import Tail, status
from tests.unit.report.records import LAYOUTS, ONE, TWO, iteration, run_object, write_log
from tools import status as tool


def test_it_says_where_the_run_is(tmp_path: Path) -> None:
    records = [iteration(k, plan=plan) for k, plan in enumerate(LAYOUTS, 1)]
    records[4] |= {"action": "③ more stages", "reason": "A: x; B: y", "switch-stall": 0.25}
    evaluation = {"event": "validation", "iteration": 4, "lm loss": 4.5}
    log = write_log(tmp_path / "log.jsonl", [run_object(), *records[:4], evaluation, records[4]])
    tail = Tail(log)
    assert tail.update()
    lines = status(tail, now=1000.0 + 50.0 + 7.0)
    text = {line[:10].strip(): line[12:] for line in lines if line[:10].strip()}
    assert text["iteration"] == "5 of 100 (5 %), 15 min 50 s left; the last one ended 7 s ago"
    assert text["loss"] == "lm loss 4.0000, validation 4.5000 at 4"
    assert text["speed"] == "10 tokens/s, 10 s an iteration (last 5)"
    assert text["plan"] == "(1,1): 2 stages of 2 workers, ③ more stages"
    assert text["time"].startswith("computing 50 %, waiting for other stages 12 %")
    assert text["bubble"] == "25 % in the last iteration"
    assert text["memory"].endswith("at most 2.0 kB lately, budget 2.5 kB (80 %)")
    assert text["switch"] == "(2) -> (1,1) at iteration 5, ③ more stages, stall 250 ms (2 in all)"
    assert [line.strip() for line in lines[-2:]] == ["A: x", "B: y"]
    assert any(line.strip() == TWO for line in lines)


def test_it_follows_a_file_that_grows_by_torn_pieces(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [run_object()])
    tail = Tail(log)
    assert tail.update()
    assert status(tail) == ["no iteration yet"]
    line = json.dumps(iteration(1)).encode() + b"\n"
    for part in (line[:30], line[30:-1]):
        with log.open("ab") as file:
            file.write(part)
        assert not tail.update()
        assert not tail.recent
    with log.open("ab") as file:
        file.write(line[-1:])
    assert tail.update()
    assert tail.recent[-1]["iteration"] == 1
    assert not tail.update()


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [iteration(1), iteration(2, plan=ONE), iteration(3)])
    tail = Tail(log)
    tail.update()
    assert (tail.switches, len(tail.recent)) == (2, 3)
    for number in (1, 5):  # a shorter file and a longer one
        objects = [iteration(k, **{"lm loss": float(number)}) for k in range(1, number + 1)]
        write_log(tmp_path / "new", objects)
        os.replace(tmp_path / "new", log)
        assert tail.update()
        assert tail.switches == 0
        assert tail.recent == objects


def test_the_tool_prints_once_where_nobody_watches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path / "log.jsonl", [run_object(), iteration(1)])
    assert tool.main([str(tmp_path)]) == 0
    assert "iteration  1 of 100" in capsys.readouterr().out
    assert tool.main([str(tmp_path / "no")]) == 1
    assert "status: " in capsys.readouterr().err


def test_lines_fit_the_terminal() -> None:
    assert tool.fitted(["x" * 30, "short", "third"], 20, 3) == ["x" * 17 + "...", "short"]
