"""The fastest fixed plan of two workers by simulation, for each schedule and way of batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from megatron_flex.config.config import Config
from megatron_flex.data.cut import Cut
from megatron_flex.loop.assemble import Parts
from megatron_flex.loop.cutting import run_cut
from megatron_flex.loop.setup import planner_setup
from megatron_flex.planner.dynapipe import dynapipe_of
from megatron_flex.planner.flops import cost_coefficients
from megatron_flex.planner.messages import Question, Task
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.service import Service
from megatron_flex.planner.ways import batch_of, targets

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
        self._cut = run_cut(config, cost, parts.model, parts.profile)
        self._service = Service(planner_setup(config, parts, 2, cost))
        self._units = parts.model.layers.num_units
        self.lengths = lengths

    def _seconds_of(self, cut: Cut, plan: str, lengths: Lengths) -> float:
        batch = batch_of(cut, lengths, Plan.parse(plan).cut)
        return self._service.make(Task("choose", plan, lengths), batch).seconds

    def seconds(self, plan: str) -> float:
        """Predicted time of all batches."""
        return sum(self._seconds_of(self._cut, plan, lengths) for lengths in self.lengths)

    def by_batch(self, plan: str) -> tuple[float, tuple[str, ...]]:
        """The same where each batch may be cut in several ways: the best, and their plans."""
        cut, total, found = self._cut, 0.0, []
        layout = plan.partition(" ; cut")[0]
        if cut.pad == "dynapipe":
            units = self._service.planner.units
            cut = replace(cut, dynapipe=dynapipe_of(units, Plan.parse(layout)))
        for lengths in self.lengths:
            plans = [f"{layout} ; cut {way}" for way in targets(cut, lengths, 2)]
            seconds = {one: self._seconds_of(cut, one, lengths) for one in plans}
            found.append(min(plans, key=seconds.__getitem__))
            total += seconds[found[-1]]
        return total, tuple(found)

    @property
    def layouts(self) -> list[str]:
        """All straight ones."""
        return layouts(self._units, v=False, whole=False)

    def fastest_layout(self, schedule: str, *, v: bool) -> tuple[float, str]:
        """Where batches are cut as the flags say: seconds, and the plan."""
        every = layouts(self._units, v=v, whole=False)
        plans = [f"{layout} ; schedule {schedule}" for layout in every]
        seconds = {plan: self.seconds(plan) for plan in plans}
        best = min(plans, key=seconds.__getitem__)
        return seconds[best], best

    def planned(self, simulations: int) -> tuple[str, ...]:
        """The planner's plan for each batch, where they come again and again."""
        running: tuple[str, Lengths] | None = None
        found: list[str] = []
        count = len(self.lengths)
        for iteration in range(2 * count):
            window = tuple(self.lengths[(iteration + i) % count] for i in range(4))
            plan, before = running or (None, ())
            question = Question(iteration, window, plan, before, simulations=simulations)
            decision = self._service.answer(question).decision
            assert decision is not None
            running = str(decision.plan), window[0]
            found.append(running[0])
        return tuple(found[count:])

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
