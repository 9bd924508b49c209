"""What each worker did when in one iteration: as it went (from a trace), and as it was planned.

The planned course is in the trace; without one it is made anew, by the trainer's own code, from the
set-up that the run's records begin with, the plan and the lengths of the batch.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_flex.planner.build import Batch
from megatron_flex.planner.maker import Made
from megatron_flex.planner.messages import Setup, Task
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.service import Service
from megatron_flex.planner.ways import micro_batches
from megatron_flex.report.figures import number
from megatron_flex.report.read import PlanLine, Record

KINDS = (
    "forward",
    "backward",
    "input half",
    "weight half",
    "wait",
    "message",
    "send",
    "reduction",
    "norm",
    "update",
    "state",
)
"""What a span can be."""
_COMPUTE = {"Forward": 0, "Backward": 1, "BackwardInput": 2, "BackwardWeight": 3}
_OTHERS = {
    "SendActivation": 6,
    "SendGradient": 6,
    "ReduceGradient": 7,
    "ScatterGradient": 7,
    "SquaredNorm": 7,
    "GlobalNorm": 8,
    "UpdateOrSkip": 9,
    "GatherParameters": 9,
    "SendState": 10,
    "RecvState": 10,
    "Recut": 10,
    "SendPiece": 10,
    "RecvPiece": 10,
    "Drop": 10,
}
_RECEIVES = {"RecvActivation": "SendActivation", "RecvGradient": "SendGradient"}
_UNITS = 100_000  # of the whole length: what times are rounded to


@dataclass(frozen=True)
class Span:
    """Something on a worker's row, in seconds from the iteration's start; -1 where it has none."""

    worker: int
    kind: int
    stage: int
    micro_batch: int
    start: float
    stop: float


@dataclass(frozen=True)
class Gantt:
    """An iteration.

    Attributes:
        tokens: of each micro-batch.
        chains: micro-batches that hold the slices of one sample, where they are known.
    """

    spans: tuple[Span, ...]
    tokens: tuple[int, ...] = ()
    chains: tuple[tuple[int, ...], ...] = ()
    schedule: str = ""

    @property
    def seconds(self) -> float:
        """From the first start to the last stop."""
        return max((s.stop for s in self.spans), default=0.0)

    def packed(self) -> dict[str, Any]:
        """As columns of small integers, rows by worker and start; ``t`` are starts, ``l`` lengths
        in units of ``u`` seconds; starts are differences from the row before."""
        unit = self.seconds / _UNITS or 1.0
        rows = sorted(self.spans, key=lambda s: (s.worker, s.start, s.kind))
        starts = [round(s.start / unit) for s in rows]
        return {
            "u": unit,
            "w": [s.worker for s in rows],
            "k": [s.kind for s in rows],
            "s": [s.stage for s in rows],
            "m": [s.micro_batch for s in rows],
            "t": [b - a for a, b in zip([0, *starts], starts, strict=False)],
            "l": [round(s.stop / unit) - t for s, t in zip(rows, starts, strict=True)],
            "n": list(self.tokens),
            "c": [list(c) for c in self.chains],
            "p": self.schedule,
        }


@dataclass(frozen=True)
class Shares:
    """Means over the workers of an iteration of a trace, in seconds.

    ``bubble``: waiting for what another worker had not yet sent; ``message``: for what was under
    way; ``norm``: the meeting at the global norm.
    """

    compute: float = 0.0
    bubble: float = 0.0
    message: float = 0.0
    reduction: float = 0.0
    norm: float = 0.0
    update: float = 0.0


def actual(events: Sequence[Record]) -> Gantt:
    """An iteration of a trace as it went.

    A receive falls in two: what it waited for before the message was sent, and after.
    """
    about: Mapping[str, Any] = {}
    timed: list[tuple[Record, dict[str, int]]] = []
    sent: dict[tuple[str, int, int, int], float] = {}
    for event in events:
        if event["ph"] == "M":
            about = event["args"] if event["name"] == "iteration" else about
            continue
        words = _words(event["args"]["what"])
        timed.append((event, words))
        if event["name"] in ("SendActivation", "SendGradient"):
            sent[event["name"], words["stage"], words["micro_batch"], words["peer"]] = event["ts"]
    begin = min((e["ts"] for e, _ in timed), default=0.0)
    spans = []
    for event, words in timed:
        name, worker = event["name"], event["pid"]
        start, stop = event["ts"] - begin, event["ts"] - begin + event["dur"]
        stage, micro_batch = words.get("stage", -1), words.get("micro_batch", -1)

        def add(kind: int, a: float, b: float, stage: int = stage, m: int = micro_batch,
                worker: int = worker) -> None:  # fmt: skip
            if b > a:
                spans.append(Span(worker, kind, stage, m, a / 1e6, b / 1e6))

        if name in _RECEIVES:
            moment = sent.get((_RECEIVES[name], stage, micro_batch, worker))
            edge = start if moment is None else min(stop, max(start, moment - begin))
            add(4, start, edge)
            add(5, edge, stop)
        elif name in _COMPUTE:
            add(_COMPUTE[name], start, stop)
        elif name in _OTHERS:
            add(_OTHERS[name], start, stop)
    return Gantt(tuple(spans), tuple(about.get("tokens", ())), (), str(about.get("schedule", "")))


def planned_in_trace(events: Sequence[Record]) -> Gantt | None:
    """An iteration of a trace as it was planned: its operations only; ``None`` without times."""
    about: Mapping[str, Any] = {}
    spans = []
    for event in events:
        if event["ph"] == "M":
            about = event["args"] if event["name"] == "iteration" else about
        elif event["name"] in _COMPUTE and "planned" in event["args"]:
            words = _words(event["args"]["what"])
            start, stop = event["args"]["planned"]
            kind = _COMPUTE[event["name"]]
            spans.append(
                Span(event["pid"], kind, words["stage"], words["micro_batch"], start, stop)
            )
    if not spans:
        return None
    return Gantt(tuple(spans), tuple(about.get("tokens", ())), (), str(about.get("schedule", "")))


def shares(gantt: Gantt) -> Shares:
    """Where the time of an iteration went, by its spans."""
    workers = {s.worker for s in gantt.spans if s.kind < 4}
    if not workers:
        return Shares()

    def mean(*kinds: int) -> float:
        rows = (s for s in gantt.spans if s.kind in kinds and s.worker in workers)
        return sum(s.stop - s.start for s in rows) / len(workers)

    return Shares(mean(0, 1, 2, 3), mean(4), mean(5, 6), mean(7), mean(8), mean(9))


def _words(text: str) -> dict[str, int]:
    """Numbers of an instruction's text form."""
    pairs = (word.partition("=") for word in text.split())
    return {key: int(value) for key, _, value in pairs if value.isdecimal()}


# ---- planned -------------------------------------------------------------------------------------


class Replanner:
    """Makes programs of a run again, from the set-up that its records begin with.

    Raises ``TypeError`` or ``ValueError`` for one of another release.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        found = Setup.from_json(setup)
        self.cut = found.cut
        self.service = Service(found)

    def gantt(self, record: Record, following: str = "", late: PlanLine | None = None) -> Gantt:
        """The planned course of an iteration.

        Args:
            record: it has ``plan`` and ``lengths``.
            following: the plan of the iteration after it; the program ends in it.
            late: the recorded line of that iteration.

        Raises ``ValueError`` where no program can be made.
        """
        plan = Plan.parse(record["plan"])
        lengths = tuple(record["lengths"])
        moves = bool(following) and self.service.moves
        moves = moves and not Plan.parse(following).keeps(plan)
        task = Task(
            f"train {record['iteration'] - 1}",
            str(plan),
            lengths,
            following if moves else "",
            late.late if late is not None and moves else (),
        )
        parts = micro_batches(self.cut, lengths, plan.cut)
        return planned(self.service.make(task, Batch.of(parts, self.cut.target(plan.cut))))


def planned(made: Made) -> Gantt:
    """A program's predicted course: operations, reductions, the norm, updates."""
    line = made.timeline
    placement = line.placement
    problem = placement.problem
    spans: list[Span] = []
    for device in range(problem.num_devices):
        for code in placement.order[device].tolist():
            kind, stage, micro_batch = problem.decode(code)
            number = (0, 2, 3)[kind] if problem.split else int(kind)
            start, stop = float(placement.start[code]), float(placement.finish[code])
            spans.append(Span(device, number, stage, micro_batch, start, stop))
        for reduction in line.reduces[device]:
            spans.append(Span(device, 7, -1, -1, reduction.start, reduction.finish))
        if line.update[device] > 0.0:
            spans.append(Span(device, 9, -1, -1, line.norm, line.norm + line.update[device]))
    return Gantt(
        tuple(spans), tuple(made.program.tokens), tuple(made.program.chains), made.schedule
    )


# ---- which, and how ------------------------------------------------------------------------------


def same_operations(a: Gantt, b: Gantt) -> bool:
    """Whether two courses compute the same on the same workers."""

    def operations(gantt: Gantt) -> set[tuple[int, int, int, int]]:
        return {(s.worker, s.kind, s.stage, s.micro_batch) for s in gantt.spans if s.kind < 4}

    return operations(a) == operations(b)


def chosen(records: Sequence[Record], changes: Iterable[int], most: int) -> list[int]:
    """Positions of the iterations that say most, the most telling first, at most ``most``.

    The last and the first one; those that switched and those right before, which carry the state;
    those that took longest for their prediction; and others, evenly spaced.
    """
    at = {r["iteration"]: i for i, r in enumerate(records)}
    first = [len(records) - 1, 0]
    switched = [i for k in changes for i in (at.get(k), at.get(k - 1)) if i is not None]
    rated = sorted(
        (i for i, r in enumerate(records) if i and number(r.get("predicted"))),
        key=lambda i: (
            (number(records[i]["predicted"]) or 0.0)
            / max(1e-9, number(records[i].get("elapsed")) or 0.0)
        ),
    )
    step = max(1, len(records) // max(1, most // 2))
    spaced = list(range(0, len(records), step))
    share = max(2, most // 4)
    order = [*first, *spread(switched, share), *rated[:share], *spaced, *switched]
    return list(dict.fromkeys(order))[:most]


def spread(items: Sequence[int], number: int) -> list[int]:
    """At most ``number`` of the items, evenly."""
    if len(items) <= number:
        return list(items)
    return [items[i * len(items) // number] for i in range(number)]


def encoded(value: Any) -> str:
    """JSON, deflated, in base64: what the page unpacks when it is looked at."""
    text = json.dumps(value, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
