"""What the first worker asks of the planner's process, and what it does in its place.

Programs are asked for ahead of their use. A process that is late or gone never stops training: the
first worker does its work then, by the same rules, while the others wait.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property

from megatron_flex.loop.planner_process import PlannerGoneError, PlannerProcess
from megatron_flex.planner.messages import Answer, Done, Question, Setup, Task
from megatron_flex.planner.package import Package
from megatron_flex.planner.plan import PlanError
from megatron_flex.planner.service import Service

STARTUP = 120.0
"""Seconds that the first reply may take: the process starts, and nothing trains meanwhile."""
PATIENCE = 0.05
"""Seconds to wait at an iteration's boundary, at least; or twice what a program took, if more."""
PATIENCE_FOR_TASKS = 5.0
"""The same where nothing but programs is asked for: the process is not deciding, but the machine is
busy, and this worker would be no faster."""
UNANSWERED = 3
"""A process that owes so many answers is asked nothing more: it would fall further behind."""
_KEPT = 16


class Desk:
    """The planner's process of one run."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.missed = 0
        self._process: PlannerProcess | None = PlannerProcess(setup)
        self._heard = False  # has the process ever replied?
        self._slowest = 0.0
        self._stalled = False  # it did not reply in time, and has not since
        self._done: OrderedDict[Task, Done] = OrderedDict()
        self._asked: OrderedDict[Task, None] = OrderedDict()
        self._answers: dict[int, Answer] = {}

    @property
    def pid(self) -> int | None:
        """Of the process, while it lives."""
        return None if self._process is None else self._process.pid

    @cached_property
    def deputy(self) -> Service:
        """The process's work in this one, once it is needed."""
        return Service(self.setup)

    def ask(self, question: Question) -> bool:
        """Put a question; whether the process still takes any."""
        self._listen(lambda: False, "", timeout=0.0)
        if self._process is None or self._process.unanswered >= UNANSWERED:
            return False
        if question.keep is not None:
            self._note(question.keep)
        self._process.ask(question)
        return True

    def expect(self, task: Task) -> None:
        """Have a task's program made, if nobody has asked for it yet."""
        self._listen(lambda: False, "", timeout=0.0)
        if task in self._asked or task in self._done or self._process is None:
            return
        if self._process.unanswered < UNANSWERED:
            self._note(task)
            self._process.ask(task)

    def _note(self, task: Task) -> None:
        self._asked[task] = None
        while len(self._asked) > _KEPT:
            self._asked.popitem(last=False)

    def answer(self, iteration: int) -> Answer | None:
        """The answer for ``iteration``, or the first one, if they come in time.

        Older ones are passed over.
        """

        def enough() -> bool:
            return iteration in self._answers and not self._answers[iteration].first

        self._listen(enough, f"iteration {iteration + 1}")
        return self._answers.pop(iteration, None)

    def package(self, task: Task, *, patient: bool = False) -> Package:
        """The program of a task: the process's, or made here.

        ``patient``: the process has nothing to do but tasks. Until it has started, which takes
        longer than most programs, they are made here.

        Raises :class:`PlanError` where there can be none.
        """
        if not self._heard and not patient:
            self.expect(task)
        if task in self._asked and (self._heard or not patient):
            patience = PATIENCE_FOR_TASKS if patient and self._heard and not self._stalled else None
            self._listen(lambda: task in self._done, f"'{task.name}'", patience)
        done = self._done.pop(task, None) or self.deputy.done(task)
        self._asked.pop(task, None)
        self._slowest = max(self._slowest, done.seconds)
        if done.package is None:
            raise PlanError(f"no program for '{task.name}': {done.problem}")
        return done.package

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _listen(self, enough: Callable[[], bool], what: str, timeout: float | None = None) -> None:
        """Take replies until there are ``enough`` or none comes in time."""
        if timeout is None:
            timeout = max(PATIENCE, 2.0 * self._slowest) if self._heard else STARTUP
        while not enough():
            try:
                reply = None if self._process is None else self._process.take(timeout)
            except PlannerGoneError as error:
                self._process = None
                self._warn(str(error), always=True)
                return
            if reply is None:
                if self._process is not None and timeout > 0.0:
                    self._stalled = True
                    self._warn(
                        f"the planner is late for {what} (it shares its core with workers, or"
                        " searches long: --flexpipe-simulations)"
                    )
                return
            self._heard, self._stalled = True, False
            if isinstance(reply, Answer):
                self._answers = {k: v for k, v in self._answers.items() if k > reply.iteration}
                self._answers[reply.iteration] = reply
            else:
                self._done[reply.task] = reply
                while len(self._done) > _KEPT:
                    self._done.popitem(last=False)

    def _warn(self, what: str, *, always: bool = False) -> None:
        self.missed += 1
        if self.missed & (self.missed - 1) and not always:  # 1, 2, 4, 8, ... times
            return
        text = f"warning: {what}; the first worker goes on without it ({self.missed} times so far)"
        print(text, file=sys.stderr, flush=True)
