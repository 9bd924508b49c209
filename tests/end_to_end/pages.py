"""Pages of real runs for the browser's tests, and how they are read there."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from megatron_flex.report.read import RunData, read_run
from tests.browser import Page
from tests.end_to_end import runs
from tests.end_to_end.processes import Job
from tools import report

READY = "document.documentElement?.dataset.ready === 'yes'"
ITERATIONS = 20
PLANS = ["0:4@0 | 4:8@1"] * 6 + ["0:8@0,1"] * 7 + ["0:2@0 | 2:5@1 | 5:8@0"] * 5 + ["0:8@0,1"] * 2
GANTT = "window.gantt"


@dataclass(frozen=True)
class Pages:
    """Two real runs, and the pages of one and of both."""

    planned: RunData
    scripted: RunData
    directory: Path
    one: Path
    both: Path


def make_pages(directory: Path) -> Pages:
    """Train with a planner, and with layouts from a file; every second iteration is traced."""
    data = runs.write_documents(directory / "text")
    (directory / "plans.txt").write_text("".join(f"{plan}\n" for plan in PLANS))
    for name, more in (
        ("planned", "--flexpipe"),
        ("scripted", f"--flexpipe-plans {directory}/plans.txt"),
    ):
        flags = shlex.split(
            f"{more} --flexpipe-memory-budget-gb 0.05 --data-path {data} --split 9,1,0"
            f" --train-iters {ITERATIONS} --eval-interval 5 --eval-iters 1"
            f" --log-jsonl {directory}/{name}/log.jsonl"
            f" --flexpipe-record {directory}/{name}/plans.txt"
            f" --flexpipe-trace {directory}/{name}/trace.json --flexpipe-trace-interval 2"
        )
        with Job(directory / f"job-{name}").start(
            "pretrain_gpt.py", [*runs.MODEL, *runs.TRAINING, *flags], size=2
        ) as job:
            assert job.wait(120.0) == [0, 0], job.output
    one, both = directory / "one.html", directory / "both.html"
    assert report.main([str(directory / "scripted"), "--output", str(one)]) == 0
    paths = [str(directory / name) for name in ("scripted", "planned")]
    assert report.main([*paths, "--output", str(both)]) == 0
    planned, scripted = (read_run([directory / name]) for name in ("planned", "scripted"))
    return Pages(planned, scripted, directory, one, both)


def plot(chart: str) -> str:
    """The drawing of a chart, as a selector."""
    return f"[data-chart={chart}] .plot"


def across(page: Page, chart: str, number: float) -> float:
    """Where an iteration is in a chart, as a share of its width."""
    script = (
        f"(() => {{ const w = document.querySelector('{plot(chart)}').clientWidth;"
        f" return (LEFT + (({number} - state.lo + 0.5) / (state.hi - state.lo + 1))"
        " * (w - LEFT - RIGHT)) / w; })()"
    )
    return float(page.run(script))


def tip(page: Page) -> dict[str, str]:
    """The box beside the pointer: its rows, and its title under ``""``; empty if it is hidden."""
    if page.run("tip.hidden"):
        return {"": ""}
    rows = page.each("#tip tr", "[...e.cells].map((c) => c.innerText.trim())")
    return {**{row[0]: row[-1] for row in rows}, "": page.text("#tip b")}


def value(text: str) -> float:
    """The number that a text begins with, in seconds, bytes, or parts of one."""
    match = re.match(r"(-?[\d,.]*\d(?:e[+-]\d+)?)\s*([^\s,;)]*)", text)
    assert match, text
    units = {"ms": 1e-3, "µs": 1e-6, "min": 60.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "%": 0.01}
    return float(match[1].replace(",", "")) * units.get(match[2], 1.0)


def view(page: Page) -> list[int]:
    """The first and the last iteration in view."""
    return list(page.run("[state.lo, state.hi]"))


def drag(page: Page, chart: str, first: float, last: float) -> None:
    """Mark iterations in a chart."""
    page.drag(plot(chart), (across(page, chart, first), across(page, chart, last)))


def show(page: Page, iteration: int, run: int = 0) -> None:
    """Choose an iteration, and wait until it is drawn operation by operation."""
    page.run(f"select({iteration})")
    page.wait(f"{GANTT}.wanted === '{run} {iteration}' && {GANTT}.found")


def place(page: Page, course: str, worker: int, seconds: float) -> tuple[float, float]:
    """Where a moment of a worker is in a drawing of operations, as shares of its size."""
    script = (
        f"(() => {{ const p = {GANTT}.panels.find((p) => p.name === '{course}'), c = p.canvas;"
        f" return [{GANTT}.x(p, {seconds}) / c.clientWidth,"
        f" ({GANTT}.rows.indexOf({worker}) + 0.4) * p.high / c.clientHeight]; }})()"
    )
    found = page.run(script)
    return found[0], found[1]
