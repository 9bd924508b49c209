"""The planner as a process of its own: questions in, decisions and programs out.

    python -m megatron_flex.planner.service < questions > answers

Messages are framed as :mod:`frames` says. The first sets it up (:class:`Setup`); each further one
is a :class:`Question` (which plan comes next?) or a :class:`Task` (what do the devices do in this
iteration?). A question about a running iteration is answered by up to four messages: the program
with which that iteration keeps its plan, a first :class:`Answer`, which is there soon, the
:class:`Answer`, and before it, where the plan changes, the program that switches.
What it remembers is a function of the questions so far: plans that were good (:mod:`pool`), and the
running correction of its predictions, which travels in the answers. How many simulations a decision
took, which may depend on clocks, is part of the decision, and a question may ask for as many. A
process, not a thread: a busy Python thread slows a worker down.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import BinaryIO

from megatron_flex.cluster.cluster import Cluster
from megatron_flex.cluster.cluster import parse as parse_cluster
from megatron_flex.cluster.profile import Profile
from megatron_flex.planner import frames
from megatron_flex.planner.budget import budget_advice, smallest_budget
from megatron_flex.planner.build import Batch
from megatron_flex.planner.candidates import MANY_DEVICES, Candidate, Finder
from megatron_flex.planner.closed_form import run_profile
from megatron_flex.planner.decision import Decision, Infeasible
from megatron_flex.planner.exhaustive import exhaustive
from megatron_flex.planner.hbsa import Hbsa
from megatron_flex.planner.limits import MARGIN
from megatron_flex.planner.lookahead import FIRST, Lookahead
from megatron_flex.planner.maker import Made
from megatron_flex.planner.messages import Answer, Done, Question, Setup, Task
from megatron_flex.planner.pace import Pace, part_of
from megatron_flex.planner.package import digest, pack
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.plans import plan_of
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.simulation import simulated
from megatron_flex.planner.switching import Running, Way, switch, travelling
from megatron_flex.planner.thin import (
    part,
    thin_cluster,
    thin_plan,
    thin_profile,
    wide_decision,
    width_of,
)
from megatron_flex.planner.ways import batch_of, micro_batches, ways
from megatron_flex.schedule.transition import Transition, transition
from megatron_flex.signals import let, plain_warnings

AT_THE_START = 200
"""Simulations of a run's first decision: no iteration waits for it, and the pool begins with it."""
START_OPERATIONS, START_LEAST = 600_000, 8
"""Fewer where a simulation places many operations: so many of them in all, but some anyway."""
REMEMBERED = 16
"""Iterations whose measured times correct the next predictions."""


class Service:
    """Answers questions one after the other."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._cluster: Cluster = parse_cluster(setup.cluster)
        given = None if setup.profile is None else Profile.from_json(setup.profile)
        self._profile = run_profile(setup.model, self._cluster, setup.options.tensor, given)
        self._static = Plan.parse(setup.static)
        self._best_static: Plan | None = None
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)
        self._memory: deque[float] = deque(maxlen=REMEMBERED)
        self._before = 0.0  # seconds of the latest decision before its simulations
        self._pool = Pool.empty()
        self._width = self._possible_width
        self._pace = Pace(part_of(self._width, setup.part))
        self._plan_with(1.0)

    def _plan_with(self, memory_factor: float) -> None:
        """Plan for a budget that is smaller by what memory was predicted too low."""
        options, budget = self._setup.options, self._setup.options.budget
        self._memory_factor = memory_factor
        if memory_factor > 1.0:
            whole = self._cluster.usable_memory if budget is None else budget
            smaller = int(whole / memory_factor)
            options = replace(options, budget=smaller, whole_budget=int(whole))
        self.planner = Planner(self._setup.model, self._profile, self._cluster, options)
        self._decide_for(self._width)

    @property
    def _possible_width(self) -> int:
        """How many devices can be planned as one (:mod:`thin`), the static plan among all."""
        options = self._setup.options
        if options.width > 1 or options.planner == "exhaustive":
            return 1
        width = width_of(self._cluster, options.server_groups_above, self._static.degrees)
        return 1 if thin_plan(self._static, width) is None else width

    def _decide_for(self, width: int) -> None:
        """Decide for one device of every ``width``."""
        self._width, self._decider, static = width, self.planner, self._static
        if width > 1:
            options = replace(self.planner.options, width=width)
            cluster = thin_cluster(self._cluster, width)
            profile = thin_profile(self._profile, self._cluster, width)
            self._decider = Planner(self._setup.model, profile, cluster, options)
            static = thin_plan(static, width) or static
        self._hbsa = Hbsa(self._decider)
        self._lookahead = Lookahead(self._decider, static, self._hbsa)
        self._finders: dict[tuple[int, ...], Finder] = {}
        self._ran: tuple[Question | None, Running | None] = None, None

    @property
    def memory_factor(self) -> float:
        """The largest ratio of measured to predicted memory of late, in steps of 1 %.

        1 where the planner's margin covers it.
        """
        most = max(self._memory, default=1.0)
        return math.ceil(100.0 * most - 1e-6) / 100.0 if most > 1.0 + MARGIN / 2 else 1.0

    @property
    def factor(self) -> float:
        """Median of measured over predicted time of the latest iterations."""
        return median(self._ratios) if self._ratios else 1.0

    def answer(self, question: Question) -> Answer:
        """Decide."""
        self._ratios.extend(s / p for p, s in question.measured if p > 0.0 and s > 0.0)
        self._memory.extend(question.memory)
        if self.memory_factor != self._memory_factor:
            self._plan_with(self.memory_factor)
        began = time.perf_counter()
        try:
            decision, running = self._decided(question)
        except (Infeasible, PlanError) as error:
            problem = f"{error}{self._budget_advice(error, question)}"
            return Answer(question.iteration, None, self.factor, problem)
        self._pace.took(decision.simulations, time.perf_counter() - began, self._before)
        late = self._late(running, decision.plan)
        whole = self._whole(decision.plan, question.window[0])
        decision = self._wide(decision)
        return Answer(question.iteration, decision, self.factor, late=late, whole=whole)

    def first(self, question: Question) -> Answer | None:
        """Decide soon, between plans that are known to be good; ``None`` where none is known."""
        if self._setup.options.planner != "lookahead" or not question.window:
            return None
        running = self._running(question)
        count = self._count(question, running)
        if count is not None and count <= FIRST:
            return None  # the whole decision is as soon
        found = self._lookahead.first(self._window(question.window)[0], running, self._pool)
        if found is None:
            return None
        decision, _ = found
        late = self._late(running, decision.plan)
        decision = self._wide(decision)
        return Answer(question.iteration, decision, self.factor, late=late, first=True)

    def _late(self, running: Running | None, plan: Plan) -> tuple[tuple[int, int], ...]:
        if running is None:
            return ()
        moves = [m for m in switch(self._decider.units, running, plan).moves
                 if m.way is Way.HAND_OVER]  # fmt: skip
        width = self._width
        return tuple(sorted((m.slab, m.device * width + k) for m in moves for k in range(width)))

    def _whole(self, plan: Plan, lengths: tuple[int, ...]) -> float:
        """Seconds of a plan without slices, where its batch has some; else 0."""
        cut, lengths = self._setup.cut, self._part(lengths)
        if not batch_of(cut, lengths, plan.cut).chains:
            return 0.0
        batch = batch_of(replace(cut, sliced=False, slice_tokens=0), lengths, plan.cut)
        found = simulated(self._decider.units, plan, batch)
        return 0.0 if found is None else found[0]

    def replies(self, question: Question) -> Iterator[Done | Answer]:
        """Programs of the iteration that runs, and the decision for the one that comes."""
        if question.keep is None:
            yield self.answer(question)
            return
        keep = question.keep
        yield replace(self.done(keep), asked=False)
        if (first := self.first(question)) is not None:
            yield first
        answer = self.answer(question)
        if answer.decision is not None:
            plan = answer.decision.plan
            if self.moves and not plan.keeps(Plan.parse(keep.plan)):
                task = replace(keep, following=str(plan), late=answer.late)
                yield replace(self.done(task), asked=False)
        yield answer

    @property
    def moves(self) -> bool:
        """Whether state moves within iterations, and not between them."""
        return self._setup.switch in ("live", "handover")

    def done(self, task: Task) -> Done:
        """A task's program; what is wrong with the program is the answer's ``problem``."""
        began = time.perf_counter()
        try:
            target = Plan.parse(task.plan).cut
            parts = micro_batches(self._setup.cut, task.lengths, target)
            made = self.make(task, Batch.of(parts, self._setup.cut.target(target)))
        except ValueError as error:
            return Done(task, None, str(error), time.perf_counter() - began)
        divided = self.planner.units.divided
        package = pack(made, task.name, digest(parts), times=self._setup.times, divided=divided)
        return Done(task, package, seconds=time.perf_counter() - began)

    def make(self, task: Task, batch: Batch) -> Made:
        """A task's program, before it is packed."""
        plan, maker = Plan.parse(task.plan), self.planner.maker
        change = self._change(plan, task)
        if change is None:
            return maker.keep(plan, batch, forward_only=task.forward_only)
        moved = None if self._setup.switch == "live" else ()
        return maker.switch(plan, batch, change, moved=moved)

    def _change(self, plan: Plan, task: Task) -> Transition | None:
        """The switch within a task's iteration."""
        following = Plan.parse(task.following) if task.following else plan
        if following.keeps(plan):
            return None
        units, layers = self.planner.units, self._setup.model.layers
        return transition(
            plan,
            following,
            layers,
            sizes=[travelling(units, slab, 1) for slab in range(layers.num_slabs)],
            late=frozenset(task.late) if self._setup.switch == "live" else None,
            server_size=self._cluster.devices_per_server,
            elements=self.planner.maker.footprint.elements,
        )

    def _decided(self, question: Question) -> tuple[Decision, Running | None]:
        while True:
            running = self._running(question)
            # The first one of a large cluster is soon there: the next one looks further.
            many = self._width > 1 or self._decider.units.num_devices > MANY_DEVICES
            known = 1 if running is None and many else len(question.window)
            finders = self._window(question.window[:known])
            count = self._count(question, running, finders[0])
            try:
                return self._decide(finders, running, count), running
            except Infeasible:
                if self._memory_factor == 1.0:
                    raise
                self._plan_with(1.0)  # better over the smaller budget than not at all

    def _running(self, question: Question) -> Running | None:
        if question.running is None:
            return None
        if self._ran[0] is not question:  # a first answer and the whole one begin with it
            plan = Plan.parse(question.running)
            thin = thin_plan(plan, self._width)
            if thin is None:  # of a run that was begun on other devices
                self._pool = Pool.empty()
                self._decide_for(1)
            batch = batch_of(self._setup.cut, self._part(question.running_lengths), plan.cut)
            self._ran = question, self._decider.running(thin or plan, batch)
        return self._ran[1]

    def _wide(self, decision: Decision) -> Decision:
        """A decision for all devices."""
        found = wide_decision(decision, self._width)
        return replace(found, plan=self.planner.units.placed(found.plan))

    def _part(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Of a batch, what falls to the devices that are decided for."""
        devices = self._decider.units.num_devices
        return part(lengths, self._width, self._setup.cut.cost, devices)

    def _window(self, window: Sequence[tuple[int, ...]]) -> list[Finder]:
        """Finders of coming batches; those of the window before it are still known."""
        cut, planner = self._setup.cut, self._decider
        devices = planner.units.num_devices
        known = self._finders
        self._finders = {
            lengths: known.get(lengths) or planner.finder(ways(cut, self._part(lengths), devices))
            for lengths in window
        }
        return [self._finders[lengths] for lengths in window]

    def _budget_advice(self, error: Exception, question: Question) -> str:
        """The smallest budget with which the batches of ``question`` fit, for the message."""
        setup = self._setup
        whole = self._cluster.usable_memory

        def fits(budget: int) -> bool:
            # Whether anything fits needs no search for the best.
            options = replace(setup.options, budget=budget, simulations=0)
            tried = Service(replace(setup, options=options))
            try:
                for start in range(len(question.window)):
                    tried._decided(Question(question.iteration, question.window[start:]))
            except (Infeasible, PlanError):
                return False
            return True

        budget = setup.options.budget
        refused = float(whole if budget is None else budget)
        size = smallest_budget(fits, refused, getattr(error, "shortfall", 0.0))
        if size is None:
            return ""
        reserved = self._cluster.reserved if budget is None else 0
        return budget_advice(size, "--flexpipe-memory-budget-gb", reserved)

    def _count(
        self, question: Question, running: Running | None, finder: Finder | None = None
    ) -> int | None:
        """Simulations of the decision; ``None``: the planner's default.

        ``finder``: of its batch, where no iteration runs.
        """
        given = self._setup.options.simulations
        if question.simulations is not None or given is not None:
            return given if question.simulations is None else question.simulations
        if running is not None:
            return self._pace.simulations(running.seconds * self.factor)
        if finder is None:
            return AT_THE_START
        parts = min(len(pricer.batch.tokens) for pricer in finder.pricers)
        operations = 3 * parts * self._decider.units.num_elements
        return min(max(START_OPERATIONS // operations, START_LEAST), AT_THE_START)

    def _decide(
        self, finders: list[Finder], running: Running | None, count: int | None
    ) -> Decision:
        name, self._before = self._setup.options.planner, 0.0
        pricers = finders[0].pricers
        if name == "hbsa":
            # The paper's algorithm is for one way of cutting.
            return self._hbsa.decide(pricers[min(1, len(pricers) - 1)].batch, running)
        if name == "exhaustive":
            found, batches = [], [pricer.batch for pricer in pricers]
            for batch in batches:
                tables = self._decider.elements.tables(batch)
                cut = exhaustive(tables)
                if cut is not None:
                    found.append(plan_of(tables, cut.groups))
            decision, self._pool = self._decider.decide_with(
                self._pool, batches, running, found, count
            )
            return decision
        if name == "given":
            return self._given(finders[0], running)
        if name == "static":
            if self._best_static is None:
                window = [[pricer.batch for pricer in finder.pricers] for finder in finders]
                self._best_static = self._decider.best_static(window)
            finder = finders[0]
            candidate = finder.best_of(self._best_static, running)
            candidate = self._decider.fitted(finder, candidate)
            if not candidate.price.fits:
                exact = self._setup.options.exact_memory
                raise finder.infeasible(candidate.price if exact else None)
            return self._decider.choose(finder, [candidate], running, settled=candidate)
        ahead, pool = self._lookahead, self._pool
        if count is not None and 0 < count <= FIRST:
            first = ahead.first(finders[0], running, pool, count)
            if first is not None:
                decision, self._pool = first
                return decision
        began = time.perf_counter()
        prospect = ahead.prospect(finders, running, pool, count)
        self._before = time.perf_counter() - began
        decision, self._pool = ahead.decide_in(prospect, finders, running, pool, count)
        return decision

    def _given(self, finder: Finder, running: Running | None) -> Decision:
        """The given layout, with the way of cutting the batch in which it is simulated fastest."""
        best, least = finder.best_of(self._lookahead.static, running), math.inf
        for way, pricer in enumerate(finder.pricers):
            price = pricer.price(self._lookahead.static)
            found = pricer.simulate(price, least) if price.fits else None
            if found is not None and found.seconds < least:
                change = finder.switch(running, self._lookahead.static)
                best, least = Candidate(price, way, change), found.seconds
        best = self._decider.fitted(finder, best)
        if not best.price.fits:
            raise finder.infeasible(best.price)
        return self._decider.choose(finder, [best], running, settled=best)


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the questions end."""
    first = frames.read(questions)
    if first is None:
        return
    service = Service(Setup.from_json(first[0]))
    while (message := frames.read(questions)) is not None:
        data, _ = message
        if "task" in data:
            frames.write(answers, *service.done(Task.from_json(data)).message())
            continue
        for reply in service.replies(Question.from_json(data)):
            if isinstance(reply, Done):
                frames.write(answers, *reply.message())
            else:
                frames.write(answers, reply.to_json())


if __name__ == "__main__":
    # A launcher that ends a job tells the whole group. A worker that may go on to save its state
    # (--exit-signal-handler) needs its planner until then; the end of the questions ends it.
    let(signal.SIGTERM, signal.SIG_IGN)
    plain_warnings()
    os.nice(5)  # workers come first where they share cores
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        # The worker has ended and says why; a traceback below its error would only hide it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
