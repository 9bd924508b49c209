"""The page as a file: what it holds, what it weighs."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.report import page as written
from megatron_flex.report.page import compact, page, rounded
from megatron_flex.report.read import RunData, read_run
from tests.unit.report.records import LAYOUTS, iteration, run_object, write_log
from tools import report as tool


def data_of(text: str) -> dict[str, Any]:
    """The data of a page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert match
    found: dict[str, Any] = json.loads(match[1])
    return found


def test_the_page_has_the_runs_numbers_and_asks_for_nothing() -> None:
    records = [iteration(k, plan=plan) for k, plan in enumerate(LAYOUTS, 1)]
    records[2] |= {"reason": "A: 1 <= 2; B: no", "action": "④ fewer stages", "switch-stall": 0.5}
    evaluations = [{"event": e, "iteration": 4, "lm loss": 4.5} for e in ("validation", "test")]
    about = [0] * len(records)
    text = page([RunData("a <b> & run", records, evaluations, about, [run_object()])])
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    assert "http" not in text.replace("http-equiv", "")
    assert "a &lt;b&gt; &amp; run" in text
    (run,) = data_of(text)["runs"]
    assert run["name"] == "a <b> & run"
    assert run["columns"]["lm loss"] == [8, 7, 6, 5, 4]
    assert run["columns"]["part_compute"] == [5] * 5
    assert run["layouts"] == [
        ["0:4@0 | 4:8@1", [[0, 4, 1], [4, 8, 1]], "(1,1)"],
        ["0:8@0,1", [[0, 8, 2]], "(2)"],
    ]
    assert run["plans"] == [[0, "", "1f1b", 0, 64], [1, "", "", 0, 0]]
    assert [(s["before"], s["after"]) for s in run["switches"]] == [(0, 1), (1, 0)]
    assert [s["iteration"] for s in run["switches"]] == [3, 5]
    assert run["switches"][0]["reason"] == ["A: 1 <= 2", "B: no"]
    assert run["memory"]["workers"] == [[2000, 1000]] * 5
    assert run["validation"] == [[4, 4.5]]
    assert run["gantts"] == {}


def test_words_of_a_run_cannot_end_the_script() -> None:
    records = [iteration(1, action="</script><!--<script>alert(1)</script>")]
    assert data_of(page([RunData("run", records)]))["runs"][0]["actions"] == [records[0]["action"]]


@given(st.floats(allow_nan=False, allow_infinity=False, width=64))
def test_numbers_are_short_and_near(value: float) -> None:
    found = rounded(value)
    assert found == pytest.approx(value, rel=1e-4, abs=1e-300)
    assert len(json.dumps(found)) <= (18 if abs(value) < 1e308 else 24)


def test_counts_stay_exact() -> None:
    assert compact([1234567.0, None], whole=True) == [1234567, None]
    assert compact([1234567.0, 0.123456789], whole=False) == [1234600, 0.12346]


def long_run(number: int) -> RunData:
    """Iterations none of whose numbers is round, with many switches, slices and workers."""
    noise = np.random.default_rng(number).uniform(0.5, 1.5, (number, 24))
    records = []
    for k in range(1, number + 1):
        plain = iteration(k, plan=f"{LAYOUTS[k // 7 % 5].partition(' ;')[0]} ; cut {k}")
        numbers = (n for n, v in plain.items() if isinstance(v, float))
        found = {n: plain[n] * x for n, x in zip(numbers, noise[k - 1], strict=False)}
        found |= {"predicted": 9.0 * noise[k - 1, 20], "predicted-uncorrected": noise[k - 1, 21],
                  "predicted-without-slices": noise[k - 1, 22], "switch-stall": noise[k - 1, 23],
                  "memory-by-worker": [k * 1000 + w for w in range(64)]}  # fmt: skip
        records.append({**plain, **found, "reason": "A: because of reasons" * 9})
    return RunData(f"long {number}", records, runs=[run_object()], about=[0] * number)


def test_ten_thousand_iterations_weigh_less_than_five_megabytes() -> None:
    began = time.perf_counter()
    run = long_run(10_000)
    text = page([run])
    assert time.perf_counter() - began < 60
    assert 2e6 < len(text.encode()) < 5e6
    assert data_of(text)["runs"][0]["group"] == 1, "all of them, one by one"


def test_several_long_runs_share_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "WEIGHT", 150_000)
    text = page([long_run(400), long_run(401)])
    assert len(data_of(text)["runs"][0]["iteration"]) < 400
    assert len(json.dumps(data_of(text), separators=(",", ":"))) < 160_000


def test_four_thousand_workers_weigh_less_than_five_megabytes() -> None:
    stages = [f"{i}:{i + 1}@{','.join(map(str, range(64 * i, 64 * i + 64)))}" for i in range(64)]
    plans = [" | ".join(stages), " | ".join([f"0:2@{stages[0][4:]},{stages[1][4:]}", *stages[2:]])]
    records = [
        iteration(k, plan=f"{plans[k % 2]} ; cut {k}",
                  **{"memory-by-worker": [k * 1000 + w for w in range(4096)]})
        for k in range(1, 201)
    ]  # fmt: skip
    text = page([RunData("wide", records, runs=[run_object()], about=[0] * len(records))])
    assert len(text.encode()) < 5e6
    (run,) = data_of(text)["runs"]
    assert run["layouts"][0][0].startswith("0:2@0-127 | 2:3@128-191 | ")
    assert len(run["layouts"]) == 2
    assert len(run["switches"]) == 199
    # The most of each group of iterations: as many groups as there is room for.
    assert [max(column) for column in zip(*run["memory"]["workers"], strict=True)] == [
        200_000 + w for w in range(4096)
    ]


def test_the_tool_writes_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        write_log(tmp_path / name / "log.jsonl", [run_object(), iteration(1), iteration(2)])
    assert tool.main([str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out.startswith(str(tmp_path / "one" / "report.html"))
    both = tmp_path / "new" / "both.html"
    runs = [str(tmp_path / "one"), str(tmp_path / "two")]
    assert tool.main([*runs, "--output", str(both), "--names", "x", "y"]) == 0
    assert [r["name"] for r in data_of(both.read_text())["runs"]] == ["x", "y"]
    assert tool.main([*runs, "--names", "x"]) == 1
    assert "there are 1 --names for 2 runs: give one each" in capsys.readouterr().err
    assert not list(tmp_path.rglob(".*"))
    read = read_run([tmp_path / "one"])
    assert len(read.iterations) == 2


def test_odd_records_leave_things_out(tmp_path: Path) -> None:
    odd = [iteration(1), iteration(2, predicted=0.0), iteration(3, predicted="NaN", elapsed="NaN"),
           iteration(4, **{"predicted-without-slices": 1.0, "predicted-uncorrected": 0.0}),
           iteration(5, plan="\ud800", lengths="many")]  # fmt: skip
    setups: tuple[Any, ...] = (None, [], {"model": {}}, {"model": "gpt"})
    for setup in setups:
        log = write_log(tmp_path / "log.jsonl", [run_object(setup=setup), *odd])
        assert tool.main([str(log)]) == 0
    assert data_of((tmp_path / "report.html").read_text())["runs"][0]["summary"]["iterations"] == 5


def test_the_simulations_of_a_directory_stand_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("flexpipe", "packed-1f1b"):
        objects = [run_object(kind="simulation"), iteration(1)]
        write_log(tmp_path / f"{name}.jsonl", objects)
    assert tool.main([str(tmp_path)]) == 0
    found = data_of((tmp_path / "report.html").read_text())["runs"]
    assert [run["name"] for run in found] == ["flexpipe", "packed-1f1b"]
    write_log(tmp_path / "trained.jsonl", [run_object(), iteration(1)])
    assert tool.main([str(tmp_path)]) == 1
    assert "several files of --log-jsonl" in capsys.readouterr().err


def test_less_than_no_drawing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["runs", "--gantts", "-1"])
    assert "--gantts must be at least 0" in capsys.readouterr().err
