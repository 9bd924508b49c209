"""Figures of a run from its records: functions of values, so that a test can say what they must be.

Fields are those of docs/logging.md. What a run's records do not have is left out, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from megatron_flex.report.read import Record, RunData
from megatron_flex.telemetry.record import LENGTH_PERCENTILES

PARTS = (
    "compute",
    "bubble",
    "message",
    "waiting",
    "norm",
    "reduce",
    "state",
    "update",
    "host",
    "stall",
    "program",
    "other",
)
"""Where the time of an iteration goes, in the order in which it is drawn."""
LONGEST = 10_000
"""Points of a page; of a longer run each is the mean of several iterations."""

_WITHIN = ("compute", "bubble", "message", "norm", "reduce", "state")
_PLAIN = {
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "tokens": "tokens",
    "samples": "global_batch_size",
    "elapsed": "elapsed",
    "bubble": "bubble",
    "memory": "memory-measured",
    "memory_predicted": "memory-predicted",
    "predicted": "predicted",
    "predicted_uncorrected": "predicted-uncorrected",
    "predicted_program": "predicted-program",
    "without_slices": "predicted-without-slices",
    "micro_batches": "micro-batches",
    "sliced_samples": "sliced-samples",
    "slices": "slices",
    "simulations": "simulations",
    "stall": "switch-stall",
}
"""Columns that are a field of the record."""
_MOST = {"memory", "memory_predicted", "length100", "simulations"}
_LEAST = {"length0"}
_SUMS = {"stall"}  # of the iterations that a point stands for
_RANGED = ("tokens_per_second", "bubble")
"""Means that have columns of the least and the most beside them, as losses do."""
Column = list[float | None]


@dataclass(frozen=True)
class Columns:
    """The numbers of a run, one entry an iteration (or a group of iterations).

    Of a group tokens a second, bubble and losses have ``NAME_least`` and ``NAME_most`` beside them.

    Attributes:
        first: the first iteration of each entry.
        group: iterations of an entry.
        values: by name; ``None`` where an iteration does not have the figure.
        plans: different layouts with all that belongs to a plan, in the order of appearance.
        plan: index of each entry's plan (of a group's last iteration); -1: none.
        actions: different actions; ``action``: index of each entry's.
    """

    first: list[int]
    group: int
    values: dict[str, Column]
    plans: list[str]
    plan: list[int]
    actions: list[str]
    action: list[int]


def number(value: Any) -> float | None:
    """A finite number of a record, else ``None`` (records have ``NaN`` and the like as words)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def time_parts(record: Mapping[str, Any], following: Mapping[str, Any] | None) -> dict[str, float]:
    """Seconds of an iteration by what they went to; they add up to ``elapsed``.

    Empty where the record does not say what went to computing.

    Args:
        record: the iteration.
        following: the iteration after it, whose record has the updates of this one; a simulation
            has them in its own.
    """
    have = {name: number(record.get(f"seconds-{name}")) for name in _WITHIN}
    elapsed = number(record.get("elapsed"))
    to_norm = number(record.get("seconds-to-norm"))
    if elapsed is None or to_norm is None or have["compute"] is None:
        return {}
    left = to_norm = min(to_norm, elapsed)
    parts: dict[str, float] = {}

    def take(name: str, seconds: float, available: float) -> float:
        """Book seconds; what is left of those available."""
        seconds = max(0.0, min(seconds, available))
        if seconds > 0.0:
            parts[name] = parts.get(name, 0.0) + seconds
        return available - seconds

    for name in _WITHIN:
        left = take(name, have[name] or 0.0, left)
    waits = [number(record.get(f"seconds-{name}")) for name in ("receive", "send")]
    if any(w is not None for w in waits):
        left = take("waiting", sum(w or 0.0 for w in waits), left)
    after = elapsed - to_norm
    if number(record.get("seconds-bubble")) is not None:  # a simulation, which knows its updates
        after = take("update", number(record.get("seconds-update")) or 0.0, after)
        after = take("host", number(record.get("seconds-host")) or 0.0, after)
    elif following is not None and following.get("iteration") == record.get("iteration", 0) + 1:
        after = take("update", number(following.get("seconds-update")) or 0.0, after)
    stall = number(record.get("switch-stall")) or 0.0
    # A stall is a longer way from the last update to the first operation: it is time before the
    # first instruction, and of state that operations wait for.
    before = after - (after := take("stall", stall, after))
    state = parts.get("state", 0.0)
    moved = min(state, max(0.0, stall - before))
    if moved > 0.0:
        parts["state"] = state - moved
        parts["stall"] = parts.get("stall", 0.0) + moved
        if parts["state"] <= 0.0:
            del parts["state"]
    program = max(0.0, (number(record.get("seconds-program")) or 0.0) - before)
    after = take("program", program, after)
    take("other", left + after, math.inf)
    return {name: parts[name] for name in PARTS if name in parts}


def balanced_seconds(record: Mapping[str, Any]) -> float | None:
    """What the computing of an iteration would take in perfect balance.

    A simulation knows what the samples alone would take, without padding and recomputation.
    """
    perfect = number(record.get("seconds-perfect"))
    return number(record.get("seconds-balanced")) if perfect is None else perfect


def columns(
    run: RunData, longest: int = LONGEST, progress: Callable[[Sequence[int]], Any] = iter
) -> Columns:
    """All columns of a run, in groups of iterations where it has more than ``longest``.

    ``progress`` goes through the iterations' positions, such as a bar.
    """
    records = run.iterations
    losses = sorted({name for r in records for name in r if name.endswith("loss")})
    rows: list[dict[str, float | None]] = []
    plans: dict[str, int] = {}
    actions: dict[str, int] = {}
    plan: list[int] = []
    action: list[int] = []
    for i in progress(range(len(records))):
        record, following = records[i], records[i + 1] if i + 1 < len(records) else None
        rows.append(_row(record, following, losses))
        text = record.get("plan") or (run.plans[k].plan if (k := record["iteration"]) in run.plans
                                      else "")  # fmt: skip
        plan.append(plans.setdefault(text, len(plans)) if text else -1)
        did = record.get("action")
        action.append(actions.setdefault(did, len(actions)) if did else -1)
    group = max(1, math.ceil(len(records) / longest))
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = {name: grouped(name, [row.get(name) for row in rows], group) for name in names}
    if group > 1:
        for name in (n for n in names if n in losses or n in _RANGED):
            column = [row.get(name) for row in rows]
            values[f"{name}_least"] = grouped(name, column, group, min)
            values[f"{name}_most"] = grouped(name, column, group, max)
    known = {name: v for name, v in values.items() if any(x is not None for x in v)}
    last = [min(i + group, len(records)) - 1 for i in range(0, len(records), group)]
    first = [records[i]["iteration"] for i in range(0, len(records), group)]
    return Columns(
        first, group, known, list(plans), [plan[i] for i in last], list(actions),
        [action[i] for i in last],
    )  # fmt: skip


def _row(
    record: Record, following: Record | None, losses: Sequence[str]
) -> dict[str, float | None]:
    row = {name: number(record.get(name)) for name in losses}
    row |= {name: number(record.get(field)) for name, field in _PLAIN.items()}
    tokens, elapsed = row["tokens"], row["elapsed"]
    if tokens is not None and elapsed:
        row["tokens_per_second"] = tokens / elapsed
    balanced = balanced_seconds(record)
    if tokens is not None and balanced:
        row["balanced"] = tokens / balanced
    quantiles = record.get("length-quantiles")
    if isinstance(quantiles, list) and len(quantiles) == len(LENGTH_PERCENTILES):
        named = zip(LENGTH_PERCENTILES, quantiles, strict=True)
        row |= {f"length{percent}": number(length) for percent, length in named}
    parts = time_parts(record, following)
    row |= {f"part_{name}": parts.get(name, 0.0) for name in PARTS if parts}
    return row


def grouped(
    name: str,
    values: Sequence[float | None],
    group: int,
    of: Callable[[Sequence[float]], float] | None = None,
) -> Column:
    """A column in groups, each what ``of`` makes of it.

    By default means, but for what is the most, the least, or a sum of its nature.
    """
    if group == 1:
        return list(values)
    own = max if name in _MOST else min if name in _LEAST else sum if name in _SUMS else fmean
    of = of or own
    found: Column = []
    for i in range(0, len(values), group):
        known = [v for v in values[i : i + group] if v is not None]
        found.append(of(known) if known else None)
    return found


# ---- switches ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Switch:
    """A change of layout before ``iteration``.

    Attributes:
        before, after: the plans.
        stall: seconds that it kept workers waiting; ``None``: not known.
    """

    iteration: int
    before: str
    after: str
    action: str
    reason: str
    stall: float | None


def stages_of(plan: str) -> str:
    """The layout in a plan's text form, without memory optimisation and what follows it."""
    return plan.partition(";")[0].strip()


def switches(run: RunData) -> list[Switch]:
    """The changes of layout between iterations that follow one another."""
    found = []
    for before, after in pairwise(run.iterations):
        old, new = (str(r.get("plan") or "") for r in (before, after))
        if not old or not new or stages_of(old) == stages_of(new):
            continue
        k = after["iteration"]
        line = run.plans.get(k)
        reason = str(after.get("reason") or (line.reason if line else ""))
        action = str(after.get("action") or "")
        found.append(Switch(k, old, new, action, reason, number(after.get("switch-stall"))))
    return found


def conditions(reason: str) -> list[str]:
    """The conditions of a decision's reason, one each."""
    return [part.strip() for part in reason.split("; ") if part.strip()]


# ---- memory --------------------------------------------------------------------------------------


def worker_memory(
    records: Sequence[Record], cells: int = 40_000
) -> tuple[list[int], list[list[int | None]]]:
    """Peak bytes of each worker over the iterations.

    Returns the first position of each group of iterations, and ``[groups][workers]`` the most in
    the group: as many groups as fit into ``cells`` numbers. Both are empty without figures.
    """
    rows = [r.get("memory-by-worker") or [] for r in records]
    workers = max(map(len, rows), default=0)
    if not workers:
        return [], []
    size = max(1, math.ceil(len(rows) * workers / cells))
    starts = list(range(0, len(rows), size))
    found = [_most(rows[i : i + size], workers) for i in starts]
    return starts, found


def _most(rows: Iterable[Sequence[float]], workers: int) -> list[int | None]:
    most: list[int | None] = [None] * workers
    for row in rows:
        for worker, value in enumerate(row):
            if value > 0 and value > (most[worker] or 0):
                most[worker] = int(value)
    return most


# ---- the whole run -------------------------------------------------------------------------------


def summary(run: RunData) -> dict[str, float]:
    """What a run came to, by name; what its records do not have is left out."""
    records = run.iterations
    found: dict[str, float] = {"iterations": len(records), "last": records[-1]["iteration"]}

    def total(field: str, where: str = "") -> float:
        rows = (r for r in records if not where or number(r.get(where)) is not None)
        return sum(number(r.get(field)) or 0.0 for r in rows)

    seconds, tokens = total("elapsed"), total("tokens")
    found |= {"seconds": seconds, "tokens": tokens}
    if seconds > 0:
        found["tokens_per_second"] = tokens / seconds
    losses = [x for r in records if not r.get("skipped")
              if (x := number(r.get("lm loss"))) is not None]  # fmt: skip
    if losses:
        n = min(10, max(1, len(losses) // 2))
        found["loss_first"] = sum(losses[:n]) / n
        found["loss_last"] = sum(losses[-n:]) / n
    timed = [(x, e) for r in records if (x := balanced_seconds(r)) is not None
             and (e := number(r.get("elapsed"))) is not None]  # fmt: skip
    if timed and (spent := sum(e for _, e in timed)) > 0:
        found["of_balance"] = sum(x for x, _ in timed) / spent
    bubbles = [(x, e) for r in records if (x := number(r.get("bubble"))) is not None
               and (e := number(r.get("elapsed"))) is not None]  # fmt: skip
    if bubbles and (whole := sum(e for _, e in bubbles)) > 0:
        found["bubble"] = sum(x * e for x, e in bubbles) / whole
    found["plans"] = len({stages_of(str(r["plan"])) for r in records if r.get("plan")})
    changes = switches(run)
    found["switches"] = len(changes)
    found["stall"] = sum(s.stall or 0.0 for s in changes)
    peaks = [x for r in records if (x := number(r.get("memory-measured"))) is not None]
    if peaks:
        found["memory"] = max(peaks)
    if (budget := number(run.last_run.get("budget"))) is not None:
        found["budget"] = budget
    if any("memory-over-budget" in r for r in records):
        found["over_budget"] = sum(bool(r.get("memory-over-budget")) for r in records)
    whole_samples = total("predicted-without-slices", "predicted-uncorrected")
    in_slices = total("predicted-uncorrected", "predicted-without-slices")
    if whole_samples > 0 and in_slices > 0:
        found["slices_save"] = whole_samples / in_slices
        found["sliced_samples"], found["slices"] = total("sliced-samples"), total("slices")
    ratios = sorted(ratios_of(records))
    if ratios:
        found["measured_to_predicted"] = ratios[len(ratios) // 2]
        found["ratio_low"] = ratios[len(ratios) // 10]
        found["ratio_high"] = ratios[-1 - len(ratios) // 10]
    return found


def ratios_of(records: Sequence[Record]) -> list[float]:
    """Measured over predicted time of the iterations that have both."""
    found = []
    for record in records:
        predicted, elapsed = number(record.get("predicted")), number(record.get("elapsed"))
        if predicted and elapsed:
            found.append(elapsed / predicted)
    return found
