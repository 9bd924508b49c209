"""What a run is at, in lines of text: from its JSON lines, which grow while it trains."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.quantities import count, duration, size
from megatron_flex.report.figures import conditions, number, stages_of, time_parts
from megatron_flex.report.read import Record
from megatron_flex.telemetry.jsonl import parse_line

RECENT = 20
"""Iterations that rates and shares are means of."""


@dataclass
class Tail:
    """Reads what is new in a growing file of JSON lines.

    Attributes:
        run: the newest object that a run begins with.
        recent: the last iterations, in order.
        switch: the newest iteration whose layout was another than that before it, and that one's.
        validation: the newest evaluation.
    """

    path: Path
    run: Record = field(default_factory=dict)
    recent: list[Record] = field(default_factory=list)
    switch: tuple[Record, str] | None = None
    switches: int = 0
    validation: Record | None = None
    _read: int = 0
    _inode: int = 0
    _rest: bytes = b""

    def update(self) -> bool:
        """Read on; whether anything was new.

        A file that was replaced (a run that resumes, or starts anew) is read from its beginning.
        """
        with self.path.open("rb") as file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._inode or state.st_size < self._read:
                self._forget()
                self._inode = state.st_ino
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._add(parse_line(line + b"\n"))
        return bool(lines)

    def _forget(self) -> None:
        self.run, self.recent, self.switch, self.switches = {}, [], None, 0
        self.validation, self._read, self._rest = None, 0, b""

    def _add(self, record: dict[str, Any] | None) -> None:
        if record is None:
            return
        if record["event"] == "run":
            self.run = record
        elif record["event"] == "iteration":
            before = str(self.recent[-1].get("plan") or "") if self.recent else ""
            plan = str(record.get("plan") or "")
            if before and plan and stages_of(before) != stages_of(plan):
                self.switch = (record, before)
                self.switches += 1
            self.recent = [*self.recent, record][-RECENT:]
        else:
            self.validation = record


def shape(plan: str) -> str:
    """The workers of each stage, such as ``(2,1,1)``."""
    try:
        return Plan.parse(plan).shape
    except PlanError:
        return plan


def status(tail: Tail, now: float | None = None) -> list[str]:
    """The lines; ``now``: seconds since the epoch, for how long ago things were."""
    if not tail.recent:
        return ["no iteration yet"]
    now = time.time() if now is None else now
    last, recent = tail.recent[-1], tail.recent
    elapsed = sum(number(r.get("elapsed")) or 0.0 for r in recent)
    tokens = sum(number(r.get("tokens")) or 0.0 for r in recent)
    end = tail.run.get("train_iters")
    per = elapsed / len(recent)
    found = [("iteration", _progress(last, end, per, now))]
    losses = [f"{name} {x:.4f}" for name in last if name.endswith("loss")
              and (x := number(last[name])) is not None]  # fmt: skip
    if tail.validation is not None and (x := number(tail.validation.get("lm loss"))) is not None:
        losses.append(f"{tail.validation['event']} {x:.4f} at {tail.validation['iteration']:,}")
    found.append(("loss", ", ".join(losses) or "none"))
    found.append(("speed", f"{count(tokens / elapsed if elapsed else 0.0)} tokens/s,"
                  f" {per:.3g} s an iteration (last {len(recent)})"))  # fmt: skip
    plan = str(last.get("plan") or "")
    if plan:
        stages = plan.count("|") + 1
        parts = f"{stages} stage{'s' * (stages > 1)}"
        if "workers" in tail.run:
            parts += f" of {tail.run['workers']} workers"
        action = f", {last['action']}" if last.get("action") else ""
        found.append(("plan", f"{shape(plan)}: {parts}{action}"))
        found.append(("", plan))
    if time_line := _times(recent):
        found.append(("time", time_line))
    if (bubble := number(last.get("bubble"))) is not None:
        found.append(("bubble", f"{100 * bubble:.0f} % in the last iteration"))
    if memory := _memory(recent, tail.run):
        found.append(("memory", memory))
    if tail.switch is not None:
        found += _switch(tail)
    return [f"{name:>10}  {text}" for name, text in found]


def _progress(last: Record, end: Any, per: float, now: float) -> str:
    text = f"{last['iteration']:,}"
    if isinstance(end, int):
        text += f" of {end:,} ({100 * last['iteration'] / max(1, end):.0f} %)"
        if last["iteration"] < end:
            text += f", {duration((end - last['iteration']) * per)} left"
    if (moment := number(last.get("time"))) is not None:
        text += f"; the last one ended {duration(max(0.0, now - moment))} ago"
    return text


def _times(recent: Sequence[Record]) -> str:
    """Where the time of the last iterations went."""
    names = {"compute": "computing", "bubble": "bubble", "message": "messages",
             "waiting": "waiting for other stages", "norm": "for the last worker",
             "reduce": "reductions", "update": "update", "stall": "stalls",
             "program": "program"}  # fmt: skip
    sums: dict[str, float] = {}
    for i, record in enumerate(recent):
        following = recent[i + 1] if i + 1 < len(recent) else None
        for name, seconds in time_parts(record, following).items():
            sums[name] = sums.get(name, 0.0) + seconds
    whole = sum(sums.values())
    shares = [(n, sums[k] / whole) for k, n in names.items() if whole and k in sums]
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share >= 0.005)


def _memory(recent: Sequence[Record], run: Record) -> str:
    last = recent[-1]
    most = max((number(r.get("memory-measured")) or 0.0 for r in recent), default=0.0)
    if not most:
        return ""
    budget = number(run.get("budget"))
    text = f"{size(number(last.get('memory-measured')) or 0.0)} on the fullest worker,"
    text += f" at most {size(most)} lately"
    if budget:
        text += f", budget {size(budget)} ({100 * most / budget:.0f} %)"
    return text


def _switch(tail: Tail) -> list[tuple[str, str]]:
    assert tail.switch is not None
    record, before = tail.switch
    text = f"{shape(before)} -> {shape(str(record['plan']))} at iteration"
    text += f" {record['iteration']:,}"
    if record.get("action"):
        text += f", {record['action']}"
    if (stall := number(record.get("switch-stall"))) is not None:
        text += f", stall {1000 * stall:.0f} ms"
    text += f" ({tail.switches} in all)"
    reasons = conditions(str(record.get("reason") or ""))
    return [("switch", text), *(("", reason) for reason in reasons)]
