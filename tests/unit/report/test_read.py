"""Which files are a run's, and what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_flex.loop.plans import Choice
from megatron_flex.loop.recording import Recording
from megatron_flex.planner.plan import Plan
from megatron_flex.report.read import ReportError, kind_of, read_plan_lines, read_run
from megatron_flex.schedule.instructions import Forward
from megatron_flex.telemetry.trace import TraceWriter, join
from tests.unit.report.records import ONE, TWO, iteration, run_object, write_log


def test_a_directory_has_a_run_whatever_its_files_are_called(tmp_path: Path) -> None:
    write_log(tmp_path / "what.txt", [run_object(), iteration(1), iteration(2)])
    write_log(tmp_path / "what.txt.1", [iteration(1)])  # of an earlier run
    recording = Recording(str(tmp_path / "notes"), 0)
    recording.add(0, Choice(Plan.parse(TWO), "① keep the plan", "A: it fits; B: too"))
    recording.add(1, Choice(Plan.parse(ONE), late=frozenset({(3, 1), (2, 0)})))
    recording.close()
    writer = TraceWriter(str(tmp_path / "spans"), 0)
    writer.add(2, [(Forward(0, 0), 1.0, 2.0)], {"plan": TWO, "tokens": [8]})
    writer.close()
    join(tmp_path / "spans")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n")
    run = read_run([tmp_path])
    assert [r["iteration"] for r in run.iterations] == [1, 2]
    assert (run.about, run.last_run["workers"]) == ([0, 0], 2)
    assert run.plans[1].reason == "A: it fits; B: too"
    assert (run.plans[2].plan, run.plans[2].late) == (ONE, ((2, 0), (3, 1)))
    assert [e["name"] for e in run.trace[2]] == ["iteration", "Forward"]
    assert read_run([tmp_path / "what.txt"]).trace, "a log brings what lies beside it"


def test_a_resumed_run_has_each_iteration_once_and_its_own_set_up(tmp_path: Path) -> None:
    log = write_log(
        tmp_path / "log.jsonl",
        [run_object(), iteration(1), run_object(1, workers=4), iteration(2),
         {"event": "validation", "iteration": 2, "lm loss": 3.0}],
    )  # fmt: skip
    run = read_run([log])
    assert run.about == [0, 1]
    assert [r["workers"] for r in run.runs] == [2, 4]
    assert run.validations == [{"event": "validation", "iteration": 2, "lm loss": 3.0}]
    assert run.name == tmp_path.name


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [iteration(1)])
    with log.open("a") as file:
        file.write(json.dumps(iteration(2))[:40])
    assert len(read_run([log]).iterations) == 1


def test_what_is_no_run_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="is not there: give the directory of a run"):
        read_run([tmp_path / "nothing"])
    with pytest.raises(ReportError, match="there is no file of --log-jsonl"):
        read_run([tmp_path])
    write_log(tmp_path / "a.jsonl", [run_object()])
    with pytest.raises(ReportError, match="has no iteration yet"):
        read_run([tmp_path])
    write_log(tmp_path / "b.jsonl", [iteration(1)])
    with pytest.raises(ReportError, match=r"several files of --log-jsonl \(a.jsonl, b.jsonl\)"):
        read_run([tmp_path])
    assert len(read_run([tmp_path / "b.jsonl"]).iterations) == 1


def test_kinds_are_known_by_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content, kind in (
        ('{"event": "iteration", "iteration": 1}\n', "log"),
        ('{"displayTimeUnit": "ms", "traceEvents": [\n{}\n]}\n', "trace"),
        (f"{TWO}  # iteration 1; action ① keep the plan\n", "plans"),
        ("just words # iteration\n", None),
        ("", None),
    ):
        path.write_text(content)
        assert kind_of(path) == kind, content
    assert read_plan_lines(path) == {}
