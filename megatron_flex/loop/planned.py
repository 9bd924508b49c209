"""``--flexpipe``: a planner chooses the plan of every iteration while others are running.

The first worker asks for iteration k+1, and for the programs of iteration k with and without the
switch to it, when the plan of k is settled. A planner that is late or gone never stops training:
the plan stays where the batch fits it, and the first worker decides where it does not.
"""

from __future__ import annotations

from collections import deque

from megatron_flex.config.config import Config
from megatron_flex.loop.desk import Desk
from megatron_flex.loop.lengths import Lengths
from megatron_flex.loop.plans import Choice
from megatron_flex.planner.messages import Answer, Question
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.service import REMEMBERED
from megatron_flex.planner.ways import batch_of


def task_name(iteration: int) -> str:
    """What the program of a training iteration is called."""
    return f"train {iteration}"


class PlannedPlans:
    """Plans from a planner's process."""

    def __init__(
        self, config: Config, static: Plan, desk: Desk, lengths: Lengths, iteration: int
    ) -> None:
        """Plans from ``iteration`` on; ``static``: the plan before there is any."""
        self._desk = desk
        self._lengths = lengths
        self._first = iteration
        self._window = desk.setup.options.lookahead
        self._choice = Choice(static, reason="static")
        self._predicted: dict[int, float] = {}
        self._measured: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._memory: deque[float] = deque(maxlen=REMEMBERED)

    def at(self, iteration: int) -> Choice:
        """The plan of ``iteration``; see :class:`megatron_flex.loop.plans.Plans`.

        Raises ``PlanError`` where its batch fits no plan.
        """
        if iteration == self._first:
            self._ask(iteration, running=False)
        answer = self._desk.answer(iteration)
        self._choice = self._keep(iteration) if answer is None else self._decided(answer)
        self._ask(iteration + 1)
        return self._choice

    def ahead(self, iteration: int) -> Choice | None:
        """Nothing is settled ahead."""
        return None

    def measured(self, iteration: int, seconds: float, memory: float) -> None:
        """Correct the planner's predictions."""
        predicted = self._predicted.pop(iteration, None)
        if predicted is not None:
            self._measured.append((predicted, seconds))
        if memory > 0.0:
            self._memory.append(memory)

    def _decided(self, answer: Answer) -> Choice:
        """What an answer means."""
        decision = answer.decision
        if decision is None:
            raise PlanError(answer.problem)
        self._predicted[answer.iteration] = uncorrected = decision.predicted.seconds
        return Choice(
            decision.plan,
            decision.action.label,
            decision.why,
            uncorrected * answer.factor,
            frozenset(answer.late),
            uncorrected,
            answer.whole or None,
            decision.simulations,
        )

    def _keep(self, iteration: int) -> Choice:
        """The layout before stays, with what this batch needs for its memory, if it fits.

        If not, this worker decides in the planner's place while the others wait: training goes on.
        """
        service = self._desk.deputy
        target = self._choice.plan.cut
        batch = batch_of(self._desk.setup.cut, self._lengths.of(iteration), target)
        finder = service.planner.finder([batch])
        current = finder.best_of(self._choice.plan, None)
        candidate = service.planner.fitted(finder, current)
        if candidate.price.fits:
            made = service.planner.maker.keep(candidate.plan, batch)
            plan = service.planner.decided(candidate.plan, batch, made.prediction)
            return Choice(plan, reason="kept: no decision")
        answer = service.answer(self._question(iteration, running=iteration > self._first))
        if answer.decision is not None:
            return self._decided(answer)
        raise PlanError(
            f"the planner gave no plan for iteration {iteration + 1}, and its batch does"
            f" not fit the plan before it ({self._choice.plan}): {answer.problem}"
        )

    def _ask(self, iteration: int, *, running: bool = True) -> None:
        if self._desk.ask(self._question(iteration, running=running)):
            self._measured.clear()
            self._memory.clear()

    def _question(self, iteration: int, *, running: bool) -> Question:
        window = tuple(self._lengths.of(iteration + i) for i in range(self._window))
        return Question(
            iteration,
            tuple(w for w in window if w),
            str(self._choice.plan) if running else None,
            self._lengths.of(iteration - 1) if running else (),
            tuple(self._measured),
            tuple(self._memory),
            task_name(iteration - 1),
        )
