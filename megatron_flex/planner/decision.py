"""What a planner answers: a plan, why, what it is predicted to cost, and what came second."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from megatron_flex.planner.plan import Plan


class Action(IntEnum):
    """What a decision does with the current plan; the paper's numbers 1 to 4, and ours."""

    START = 0  # there is none yet
    KEEP = 1
    OPTIMISE = 2
    GROW = 3
    SHRINK = 4
    MIGRATE = 5  # as many stages, other boundaries or devices

    @property
    def symbol(self) -> str:
        """The number in a circle, as the paper prints it."""
        return "⓪①②③④⑤"[self]

    @property
    def words(self) -> str:
        """What it does, in words."""
        return (
            "first plan",
            "keep the plan",
            "save memory",
            "more stages",
            "fewer stages",
            "other boundaries or workers",
        )[self]

    @property
    def label(self) -> str:
        """Symbol and words."""
        return f"{self.symbol} {self.words}"


@dataclass(frozen=True)
class Reason:
    """One condition of the decision with both its sides (docs/planner.md).

    Attributes:
        condition: ``A`` to ``D``, or a rule's name.
        text: what was asked.
        left, right: both sides of ``left <= right`` or ``left >= right``, as ``text`` says.
        unit: of both sides, ``bytes`` or ``seconds``.
        holds: the answer.
    """

    condition: str
    text: str
    left: float
    right: float
    unit: str
    holds: bool

    @property
    def sides(self) -> str:
        """Both sides with their unit; bytes in GB, or where they are few in MB."""
        if self.unit != "bytes":
            return f"{self.left:.4f} s against {self.right:.4f} s"
        large = max(self.left, self.right) >= 1e9
        return " against ".join(
            f"{v / 1e9:.3f} GB" if large else f"{v / 1e6:.1f} MB" for v in (self.left, self.right)
        )


@dataclass(frozen=True)
class Predicted:
    """What a plan is predicted to cost in the next iteration.

    Attributes:
        seconds: the iteration, with memory optimisation, without the switch.
        switch_seconds: what the switch from the current plan adds, in both iterations.
        recompute_seconds, swap_seconds: part of ``seconds`` that memory optimisation adds.
        device_bytes: peak on each device of the world; 0 where it is idle.
        recomputed_bytes: r: activations recomputed, summed over the stages' fullest replicas.
        offloaded_bytes: s: bytes on the host, likewise.
        simulated: whether ``seconds`` is from the simulated schedule (else the closed form).
    """

    seconds: float
    switch_seconds: float
    recompute_seconds: float
    swap_seconds: float
    device_bytes: tuple[float, ...]
    recomputed_bytes: float
    offloaded_bytes: float
    simulated: bool

    @property
    def total(self) -> float:
        """Iteration and switch."""
        return self.seconds + self.switch_seconds


@dataclass(frozen=True)
class Decision:
    """A planner's answer for the next iteration.

    Attributes:
        plan: stages, devices and O_plan.
        action: what it does with the current plan.
        micro_batching: which of the given ways of cutting the batch it is for.
        predicted: of ``plan``.
        reasons: conditions that led here, with numbers.
        current: prediction for the current plan; ``None`` without one, or when it does not fit.
        runner_up: the second-best plan and its prediction.
        budget: bytes that each device may use.
        planner: who decided.
        simulations: how many it took; with as many it is repeated exactly.
    """

    plan: Plan
    action: Action
    micro_batching: int
    predicted: Predicted
    reasons: tuple[Reason, ...]
    current: Predicted | None
    runner_up: tuple[Plan, Predicted] | None
    budget: float
    planner: str
    simulations: int = 0

    @property
    def why(self) -> str:
        """The reasons in a line, as an iteration's record has them."""
        return "; ".join(
            f"{r.condition}: {r.text} ({r.sides}: {'yes' if r.holds else 'no'})"
            for r in self.reasons
        )

    def to_json(self) -> str:
        """All of it as JSON; :meth:`from_json` reads it back to an equal decision."""
        data = asdict(self)
        data["plan"] = str(self.plan)
        data["action"] = self.action.name.lower()
        if self.runner_up is not None:
            data["runner_up"] = {"plan": str(self.runner_up[0]), **asdict(self.runner_up[1])}
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """Read :meth:`to_json`'s form; ``ValueError`` for anything else."""
        data = json.loads(text)
        second = data["runner_up"]
        return cls(
            plan=Plan.parse(data["plan"]),
            action=Action[data["action"].upper()],
            micro_batching=data["micro_batching"],
            predicted=_predicted(data["predicted"]),
            reasons=tuple(Reason(**reason) for reason in data["reasons"]),
            current=None if data["current"] is None else _predicted(data["current"]),
            runner_up=None if second is None else (Plan.parse(second["plan"]), _predicted(second)),
            budget=data["budget"],
            planner=data["planner"],
            simulations=data["simulations"],
        )


def _predicted(data: Mapping[str, Any]) -> Predicted:
    fields = {name: data[name] for name in Predicted.__dataclass_fields__}
    return Predicted(**{**fields, "device_bytes": tuple(fields["device_bytes"])})


class Infeasible(ValueError):
    """No plan fits this batch. The message names the shortfall and what to change.

    Attributes:
        shortfall: bytes that every device would need more.
    """

    def __init__(self, message: str, shortfall: int) -> None:
        super().__init__(message)
        self.shortfall = shortfall


def action_of(current: Plan | None, plan: Plan) -> Action:
    """Which action leads from ``current`` to ``plan``."""
    if current is None:
        return Action.START
    if current.stages == plan.stages:
        return Action.OPTIMISE if plan.o_plan else Action.KEEP
    before, after = len(current.stages), len(plan.stages)
    if after == before:
        return Action.MIGRATE
    return Action.GROW if after > before else Action.SHRINK
