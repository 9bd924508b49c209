"""One page of HTML from runs: data, style and script in one file that needs nothing else."""

from __future__ import annotations

import html
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from megatron_flex.planner.plan import Plan, PlanError, Stage
from megatron_flex.report import gantt
from megatron_flex.report.figures import (
    LONGEST,
    PARTS,
    Column,
    columns,
    conditions,
    number,
    summary,
    switches,
    worker_memory,
)
from megatron_flex.report.read import Record, RunData

SCRIPTS = (
    "tools.js",
    "chart.js",
    "charts.js",
    "plans.js",
    "times.js",
    "points.js",
    "gantt.js",
    "tables.js",
    "page.js",
)
LEAST = 200
"""Points of a run, at least."""
DIGITS = 5
"""Digits of a number on the page."""
GANTTS = 60
"""Iterations of a run that are drawn operation by operation, unless asked for more."""
PATIENCE = 30.0
"""Seconds after which no further iterations are drawn that nobody asked for."""
WEIGHT = 4_600_000
"""Characters of a page's data, at most."""
ROOM = 3_000_000
"""Of these, what iterations that are drawn may take, of all runs."""
SWITCHES = 2_000
"""Switches that are listed of all runs, the last ones of each."""
_WHOLE = {"tokens", "samples", "micro_batches", "slices", "sliced_samples", "simulations"}

Progress = Callable[[Sequence[int]], Any]


def page(
    runs: Sequence[RunData],
    *,
    wanted: Sequence[int] = (),
    gantts: int = GANTTS,
    longest: int = LONGEST,
    progress: Progress = iter,
) -> str:
    """The page.

    Args:
        runs: one, or several side by side.
        wanted: iterations that are drawn operation by operation in any case.
        gantts: how many of each run are, at most, beside them.
        longest: points of a run; of one with more iterations, or where several are too much for a
            page, each is the mean of several.
        progress: goes through iterations, such as a bar.
    """
    several = len(runs)
    while True:
        found = [_run(run, longest, several, progress) for run in runs]
        weight = len(_json(found))
        if weight <= WEIGHT or longest <= LEAST:
            break
        longest = max(LEAST, int(longest * WEIGHT / weight * 0.95))
    room = min(ROOM, max(0, WEIGHT - weight)) // several
    for run, seen in zip(runs, found, strict=True):
        seen["gantts"] = _gantts(run, wanted, gantts, room, progress)
    data = {"parts": list(PARTS), "kinds": list(gantt.KINDS), "runs": found}
    title = ", ".join(run.name for run in runs)
    kinds = {str(run.last_run.get("kind", "training")) for run in runs}
    what = "runs" if len(runs) > 1 else "run"
    return _read("page.html").format(
        title=html.escape(f"{title}: {' and '.join(sorted(kinds))} {what}"),
        style=_read("page.css"),
        data=_json(data).replace("<", "\\u003c"),  # nothing of a script's end or a comment
        script="\n".join(map(_read, SCRIPTS)),
    )


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _read(name: str) -> str:
    return resources.files("megatron_flex.report").joinpath(name).read_text(encoding="utf-8")


def _run(run: RunData, longest: int, runs: int, progress: Progress) -> dict[str, Any]:
    """All that the page knows of one of several runs, but for its drawn iterations."""
    found = columns(run, longest, progress)
    changes = switches(run)
    starts, memory = worker_memory(run.iterations, 4 * longest // runs)
    about = run.last_run
    number_of = {text: i for i, text in enumerate(found.plans)}
    losses = sorted(name for name in found.values if name.endswith("loss"))
    return {
        "name": run.name,
        "about": {
            name: about[name]
            for name in ("kind", "workers", "width", "parameters", "budget", "train_iters")
            if name in about
        },
        "model": _model(about),
        "summary": {name: rounded(value) for name, value in summary(run).items()},
        "group": found.group,
        "iteration": found.first,
        "losses": losses,
        "columns": {n: compact(v, whole=n in _WHOLE) for n, v in found.values.items()},
        **_plans(found.plans),
        "plan": found.plan,
        "actions": found.actions,
        "action": found.action,
        "switches": [
            {
                "iteration": s.iteration,
                "before": number_of[s.before],
                "after": number_of[s.after],
                "action": s.action,
                "reason": conditions(s.reason),
                "stall": _maybe(s.stall),
            }
            for s in changes[-(min(SWITCHES, longest) // runs) :]
        ],
        "validation": [
            [v["iteration"], rounded(x)]
            for v in run.validations
            if v["event"] == "validation" and (x := number(v.get("lm loss"))) is not None
        ],
        "memory": {"starts": [run.iterations[i]["iteration"] for i in starts], "workers": memory},
    }


def _model(about: Record) -> str:
    """The model in a few words, where the run says."""
    setup = about.get("setup")
    model = setup.get("model") if isinstance(setup, dict) else None
    wanted = ("architecture", "num_layers", "hidden_size", "max_position_embeddings")
    if not isinstance(model, dict) or not all(name in model for name in wanted):
        return ""
    return (
        f"{model['architecture'].upper()}, {model['num_layers']} layers of"
        f" {model['hidden_size']}, up to {model['max_position_embeddings']} tokens"
    )


def _plans(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Plans as the page draws them.

    ``layouts``: text, ``[start, stop, workers]`` of each stage, and the shape in short, each layout
    once; ``plans``: number of the layout, memory optimisation, schedule, spare bytes, cut.
    """
    layouts: dict[str, int] = {}
    described: list[list[Any]] = []
    plans: list[list[Any]] = []
    for text in texts:
        try:
            plan = Plan.parse(text)
        except PlanError:
            plan = None
        layout = text if plan is None else " | ".join(map(_stage, plan.stages))
        if layout not in layouts:
            layouts[layout] = len(layouts)
            stages = [] if plan is None else plan.stages
            short = "" if plan is None else plan.shape
            described.append([layout, [[s.start, s.stop, len(s.group)] for s in stages], short])
        row: list[Any] = [layouts[layout]]
        if plan is not None:
            row += [str(plan.o_plan), plan.schedule, plan.spare, plan.cut]
        plans.append(row)
    return {"layouts": described, "plans": plans}


def _stage(stage: Stage) -> str:
    """As in a plan's text, with ranges where there are many workers in order."""
    first, last = stage.group[0], stage.group[-1]
    if len(stage.group) > 4 and stage.group == tuple(range(first, last + 1)):
        return f"{stage.start}:{stage.stop}@{first}-{last}"
    return str(stage)


def _gantts(
    run: RunData, wanted: Sequence[int], gantts: int, room: int, progress: Progress
) -> dict[int, str]:
    """Iterations operation by operation, packed, until the room is used up."""
    records = run.iterations
    changes = [s.iteration for s in switches(run)]
    at = {r["iteration"]: i for i, r in enumerate(records)}
    first = [at[k] for k in wanted if k in at]
    traced = [at[k] for k in run.trace if k in at]
    likely = gantt.chosen(records, changes, gantts)
    some = [i for i in likely if i in set(traced)]
    others = gantt.spread([i for i in traced if i not in set(some)], max(0, gantts - len(some)))
    order = list(dict.fromkeys([*first, *some, *others, *likely]))[: gantts + len(first)]
    makers = Replanners(run)
    found: dict[int, str] = {}
    until = time.monotonic() + PATIENCE
    for i in progress(order):
        late = time.monotonic() > until and i not in first
        drawn = {} if late or room <= 0 else _drawn(run, i, makers)
        if not drawn:
            continue
        text = gantt.encoded(drawn)
        if len(text) <= room or i in first:
            room -= len(text)
            found[records[i]["iteration"]] = text
    return dict(sorted(found.items()))


class Replanners:
    """Makes programs of a run's iterations again; a resumed run may have another set-up."""

    def __init__(self, run: RunData) -> None:
        self._run = run
        self._made: dict[int, gantt.Replanner | None] = {}

    def of(self, position: int) -> gantt.Replanner | None:
        """For the iteration at a position; ``None`` where its run does not say enough."""
        number = self._run.about[position] if self._run.about else -1
        if number < 0 or not isinstance(self._run.runs[number].get("setup"), dict):
            return None
        if number not in self._made:
            try:
                self._made[number] = gantt.Replanner(self._run.runs[number]["setup"])
            except (KeyError, TypeError, ValueError):  # of another release
                self._made[number] = None
        return self._made[number]


def _drawn(run: RunData, position: int, makers: Replanners) -> dict[str, Any]:
    """The courses of one iteration that there are: ``planned``, ``actual``, and its ``shares``."""
    records = run.iterations
    record = records[position]
    found: dict[str, Any] = {}
    events = run.trace.get(record["iteration"])
    plan = None
    if events:
        actual = gantt.actual(events)
        found["actual"] = actual.packed()
        found["shares"] = {n: rounded(v) for n, v in asdict(gantt.shares(actual)).items()}
        plan = gantt.planned_in_trace(events)
    maker = makers.of(position)
    if maker is not None and record.get("plan") and record.get("lengths"):
        after = records[position + 1] if position + 1 < len(records) else {}
        next_in_order = after.get("iteration") == record["iteration"] + 1
        same_run = next_in_order and run.about[position] == run.about[position + 1]
        following = str(after.get("plan") or "") if same_run else ""
        line = run.plans.get(record["iteration"] + 1)
        try:
            made = maker.gantt(record, following, line)
        except (ArithmeticError, KeyError, TypeError, ValueError):
            made = None
        # What the trace has is what ran; what is made anew has reductions and updates as well.
        if made is not None and (plan is None or gantt.same_operations(made, plan)):
            plan = made
    if plan is not None:
        found["planned"] = plan.packed()
    return found


# ---- numbers -------------------------------------------------------------------------------------


def rounded(value: float) -> float | int:
    """A number with :data:`DIGITS` digits, as an integer where it is one."""
    if value == 0 or not math.isfinite(value):
        return 0
    short = float(f"{value:.{DIGITS}g}")
    if not math.isfinite(short):
        return value
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def _maybe(value: float | None) -> float | int | None:
    return None if value is None else rounded(value)


def compact(values: Column, *, whole: bool) -> list[float | int | None]:
    """A column with short numbers; integers stay exact."""
    found: list[float | int | None] = []
    for value in values:
        if value is not None and whole and value == int(value):
            found.append(int(value))
        else:
            found.append(_maybe(value))
    return found
