"""Which plan each iteration runs on. The plan of iteration k+1 is known before k begins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.schedule.slabs import slab_holders


@dataclass(frozen=True)
class Choice:
    """A plan and why it was chosen.

    Attributes:
        plan: the plan.
        action: what it does with the plan before it, as the paper's symbol and in words, such as
            ``③ more stages``; empty where nobody decided.
        reason: in words.
        seconds: predicted time of an iteration on it, if it was predicted.
        late: (slab, device) pairs that are handed over after the update of the iteration before,
            for lack of room for an early copy.
        uncorrected: ``seconds`` as the cost model has it, without what earlier iterations taught.
        whole: the same with whole samples, where some are cut to slices.
        simulations: how many the decision took; with as many it is repeated exactly.
    """

    plan: Plan
    action: str = ""
    reason: str = ""
    seconds: float | None = None
    late: frozenset[tuple[int, int]] = frozenset()
    uncorrected: float | None = None
    whole: float | None = None
    simulations: int | None = None

    def to_json(self) -> dict[str, Any]:
        """What the first worker tells the others."""
        return {**vars(self), "plan": str(self.plan), "late": sorted(self.late)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Choice:
        """Read :meth:`to_json`'s form."""
        late = frozenset((slab, device) for slab, device in data["late"])
        return cls(**{**data, "plan": Plan.parse(data["plan"]), "late": late})


class Plans(Protocol):
    """Where plans come from; on the first worker only, which tells the others."""

    def at(self, iteration: int) -> Choice:
        """The plan that iteration ``iteration`` (from 0) runs on.

        Asked for the first iteration of a run, then in order for each that follows.
        """

    def ahead(self, iteration: int) -> Choice | None:
        """The plan of a later iteration, where it is settled already."""

    def measured(self, iteration: int, seconds: float, memory: float) -> None:
        """What an iteration took, to correct predictions with.

        ``memory``: the largest ratio of measured to predicted bytes of a device; 0 if unknown.
        """


@dataclass
class ScriptedPlans:
    """A plan for each iteration; the last one stays."""

    choices: list[Choice]

    def at(self, iteration: int) -> Choice:
        """The plan in line ``iteration``."""
        return self.choices[min(iteration, len(self.choices) - 1)]

    def ahead(self, iteration: int) -> Choice | None:
        """The same: all are settled."""
        return self.at(iteration)

    def measured(self, iteration: int, seconds: float, memory: float) -> None:
        """Nobody plans."""


_LATE = re.compile(r"([0-9]+)@([0-9]+)")


def read_plans(path: str, layers: LayerList, num_devices: int) -> list[Choice]:
    """The plans of a ``--flexpipe-plans`` file; raises ``PlanError`` naming the line.

    A line is a plan, then, after ``~``, the slabs (as SLAB@WORKER) that are handed over after the
    update of the iteration before it, and after ``#`` what people say of it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--flexpipe-plans {path} cannot be read: {error}") from error
    plans = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        words, _, late = words.partition("~")
        try:
            plan = Plan.parse(words)
            plan.check(layers.num_units, num_devices)
            handed_over = _handed_over(late, plan, layers, num_devices)
        except PlanError as error:
            raise PlanError(f"--flexpipe-plans {path}, line {number}: {error}") from None
        plans.append(Choice(plan, reason="scripted", late=handed_over))
    if not plans:
        raise PlanError(f"--flexpipe-plans {path} has no plans")
    return plans


def _handed_over(
    text: str, plan: Plan, layers: LayerList, num_devices: int
) -> frozenset[tuple[int, int]]:
    """The (slab, device) pairs after ``~``; raises ``PlanError`` for one that cannot be."""
    holders = slab_holders(plan, layers)
    pairs = [_LATE.fullmatch(word.strip()) for word in text.split(",") if word.strip()]
    if None in pairs:
        raise PlanError(f"'{text.strip()}': expected SLAB@WORKER, such as 3@1,4@2")
    result = set()
    for match in filter(None, pairs):
        word, slab, device = match[0], int(match[1]), int(match[2])
        if slab >= len(holders):
            raise PlanError(
                f"'{word}' names slab {slab}, but the model has {len(holders)}"
                f" (0 to {len(holders) - 1})"
            )
        if device >= num_devices:
            raise PlanError(
                f"'{word}' names worker {device}, but there are {num_devices}"
                f" (0 to {num_devices - 1})"
            )
        if device not in holders[slab]:
            raise PlanError(
                f"'{word}' hands slab {slab} to worker {device}, which does not hold it under this"
                f" plan (held by {', '.join(map(str, holders[slab]))})"
            )
        result.add((slab, device))
    return frozenset(result)
