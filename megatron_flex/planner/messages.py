"""What the planner's process is asked and what it answers, and their forms on the wire.

Framing is :mod:`frames`'s; who asks is ``loop/desk.py``, who answers :mod:`service`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_flex.data.cut import Cut
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.decision import Decision
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.pace import PART
from megatron_flex.planner.package import Package


@dataclass(frozen=True)
class Setup:
    """What stays the same for a run.

    Attributes:
        switch: how plans change, as ``--flexpipe-switch`` says.
        part: of an iteration, for a decision (``planner/pace.py``).
        times: workers are sent the predicted times of their operations.
    """

    model: ModelConfig
    cluster: dict[str, Any]
    profile: str | None
    options: PlannerOptions
    cut: Cut
    static: str
    switch: str = "live"
    part: float = PART
    times: bool = False

    def to_json(self) -> dict[str, Any]:
        """As a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Setup:
        """Read :meth:`to_json`'s form."""
        given = dict(data)
        given["model"] = ModelConfig(**data["model"])
        given["options"] = PlannerOptions(**data["options"])
        given["cut"] = Cut.from_json(data["cut"])
        return cls(**given)


@dataclass(frozen=True)
class Task:
    """What do the devices do in one iteration?

    Attributes:
        name: whatever it is called, such as ``train 12``.
        plan: the layout that they are in.
        lengths: of the samples of its batch.
        following: the layout that it leaves behind; the same where nothing moves.
        late: (slab, device) pairs that are handed over after the update.
        forward_only: an evaluation.
    """

    name: str
    plan: str
    lengths: tuple[int, ...]
    following: str = ""
    late: tuple[tuple[int, int], ...] = ()
    forward_only: bool = False

    def to_json(self) -> dict[str, Any]:
        """As a message."""
        return {"task": asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Task:
        """Read :meth:`to_json`'s form."""
        given = dict(data["task"])
        given["lengths"] = tuple(given["lengths"])
        given["late"] = tuple((slab, device) for slab, device in given["late"])
        return cls(**given)


@dataclass(frozen=True)
class Question:
    """Which plan for iteration ``iteration``?

    Attributes:
        window: lengths of the samples of its batch and of those that follow it.
        running: the plan of the iteration before it; ``None`` at the start.
        running_lengths: that iteration's sample lengths.
        measured: what newly measured iterations took, as (predicted, seconds); predictions are
            those of earlier answers, without correction.
        memory: of newly measured iterations, the largest ratio of measured to predicted peak
            memory of a device.
        name: of the iteration before it as a task: its programs are wanted, too.
        simulations: how many the decision takes, to repeat a recorded one; ``None``: as the options
            say.
    """

    iteration: int
    window: tuple[tuple[int, ...], ...]
    running: str | None = None
    running_lengths: tuple[int, ...] = ()
    measured: tuple[tuple[float, float], ...] = ()
    memory: tuple[float, ...] = ()
    name: str = ""
    simulations: int | None = None

    @property
    def keep(self) -> Task | None:
        """The iteration before it as a task, if it keeps its plan."""
        if self.running is None or not self.name:
            return None
        return Task(self.name, self.running, self.running_lengths)

    def to_json(self) -> dict[str, Any]:
        """As a message."""
        return {"question": asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Question:
        """Read :meth:`to_json`'s form."""
        given = dict(data["question"])
        given["window"] = tuple(map(tuple, given["window"]))
        given["running_lengths"] = tuple(given["running_lengths"])
        given["measured"] = tuple((p, s) for p, s in given["measured"])
        given["memory"] = tuple(given["memory"])
        return cls(**given)


@dataclass(frozen=True)
class Answer:
    """The decision for ``iteration``, or why there is none.

    ``late``: (slab, device) pairs for which there is no room before the update: handed over after.
    ``factor``: measured over predicted time of late; predictions times it are the best guess.
    ``problem``: no plan fits, in words; else empty.
    ``whole``: predicted seconds of the same plan with whole samples, where some are cut to slices;
    else 0. ``first``: a better one is on its way, which need not be waited for.
    """

    iteration: int
    decision: Decision | None
    factor: float
    problem: str = ""
    late: tuple[tuple[int, int], ...] = ()
    whole: float = 0.0
    first: bool = False

    def to_json(self) -> dict[str, Any]:
        """As a message."""
        decision = None if self.decision is None else self.decision.to_json()
        return {"answer": {**vars(self), "decision": decision}}

    @classmethod
    def from_json(cls, message: dict[str, Any]) -> Answer:
        """Read :meth:`to_json`'s form."""
        given = dict(message["answer"])
        if given["decision"] is not None:
            given["decision"] = Decision.from_json(given["decision"])
        given["late"] = tuple((slab, device) for slab, device in given["late"])
        return cls(**given)


@dataclass(frozen=True)
class Done:
    """The program of a task, or why there is none.

    ``seconds``: what making it took. ``asked``: it was asked for, and did not come with an answer.
    """

    task: Task
    package: Package | None
    problem: str = ""
    seconds: float = 0.0
    asked: bool = True

    def message(self) -> tuple[dict[str, Any], bytes]:
        """As a message: data and bytes."""
        parts = () if self.package is None else self.package.parts
        data = {
            **self.task.to_json(),
            "header": None if self.package is None else self.package.header,
            "sizes": list(map(len, parts)),
            "problem": self.problem,
            "seconds": self.seconds,
            "asked": self.asked,
        }
        return data, b"".join(parts)

    @classmethod
    def from_message(cls, data: dict[str, Any], blob: bytes) -> Done:
        """Read :meth:`message`'s form."""
        parts, at = [], 0
        for size in data["sizes"]:
            parts.append(blob[at : at + size])
            at += size
        header = data["header"]
        package = None if header is None else Package(header, tuple(parts))
        return cls(Task.from_json(data), package, data["problem"], data["seconds"], data["asked"])
