"""The fastest fixed plan of two workers by simulation, for each schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from megatron_flex.config.config import Config
from megatron_flex.loop.assemble import Parts
from megatron_flex.loop.iteration import cost_coefficients, run_cut
from megatron_flex.loop.setup import planner_setup
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.service import Service, Task
from megatron_flex.planner.ways import batch_of

TARGETS = (128, 256, 512, 1024)
"""Micro-batches cost as much as a sample of so many tokens: what is simulated."""
Lengths = tuple[int, ...]


def layouts(units: int, *, v: bool, whole: bool) -> list[str]:
    """All of two stages, or of four in a V; with ``whole`` they are of whole layers."""
    places = range(1, units, 2 if whole else 1)
    return [_layout((0, *cuts, units), v) for cuts in combinations(places, 3 if v else 1)]


def _layout(edges: Sequence[int], v: bool) -> str:
    stages = zip(pairwise(edges), (0, 1, 1, 0) if v else (0, 1), strict=True)
    return " | ".join(f"{a}:{b}@{device}" for (a, b), device in stages)


def other(plan: str, schedule: str, target: int = 0) -> str:
    """The same layout with another schedule, and perhaps cut by another target."""
    parsed = Plan.parse(plan)
    layout = " | ".join(map(str, parsed.stages))
    return f"{layout} ; schedule {schedule} ; cut {target or parsed.cut}"


class Chooser:
    """Simulates plans on batches of given lengths, as the flags of ``config`` cut them."""

    def __init__(self, config: Config, parts: Parts, lengths: Sequence[Lengths]) -> None:
        cost = cost_coefficients(parts.model)
        self._cut = run_cut(config, cost)
        self._service = Service(planner_setup(config, parts, 2, cost))
        self._units = parts.model.layers.num_units
        self.lengths = lengths

    def seconds(self, plan: str) -> float:
        """Predicted time of all batches."""
        target, total = Plan.parse(plan).cut, 0.0
        for lengths in self.lengths:
            batch = batch_of(self._cut, lengths, target)
            total += self._service.make(Task("choose", plan, lengths), batch).seconds
        return total

    def best(self, plans: Iterator[str] | Sequence[str]) -> str:
        """The fastest."""
        return min(plans, key=self.seconds)

    def fastest(self, schedule: str, *, v: bool) -> str:
        """Layout and target in turn: each is the best for the other's."""
        every = layouts(self._units, v=v, whole=False)
        plan = other(every[len(every) // 2], schedule, TARGETS[-2])
        for _ in range(2):
            target = Plan.parse(plan).cut
            plan = self.best([other(layout, schedule, target) for layout in every])
            plan = self.best([other(plan, schedule, target) for target in TARGETS])
        return plan

    def of_whole_layers(self, schedule: str, *, v: bool) -> str:
        """For micro-batches of one sample."""
        target = max(map(max, self.lengths))
        every = layouts(self._units, v=v, whole=True)
        return self.best([other(layout, schedule, target) for layout in every])
