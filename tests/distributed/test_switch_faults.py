"""Faults during a switch alone: each must be noticed, and a dead worker ends the job.

Three workers train on one plan, switch in the second iteration, and go on. Only that iteration is
broken, mostly only on the worker that joins.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_flex.checkpoint.layout import latest
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.failure import EXIT_PEER_LOST
from megatron_flex.runtime.groups import ReductionGroups
from megatron_flex.runtime.slab import Slab
from megatron_flex.runtime.step import StepInputs, StepResult
from megatron_flex.schedule.instructions import (
    Drop,
    GlobalNorm,
    Instruction,
    Program,
    RecvState,
    ReduceGradient,
    SendState,
    SquaredNorm,
    UpdateOrSkip,
)
from megatron_flex.schedule.part import Part
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import TIED, reference
from tests.distributed.test_failures import FLAGS, SECONDS, saving
from tests.end_to_end.processes import Job

#: Slabs 0 to 3 go to worker 2, which has none; 4 to 7 stay on 1; the tied embedding is on all.
KEEPING = ["0:4@0 | 4:8@1", "0:4@0 | 4:8@1", "0:4@2,0 | 4:8@1"]
#: Worker 0 gives up what worker 2 gets.
MIGRATION = ["0:4@0 | 4:8@1", "0:4@0 | 4:8@1", "0:4@2 | 4:8@1"]
ITERATIONS = 5
NOTICED = r"iteration \d|differs by|other bits|disagree"


def joined(program: Program, rank: int) -> set[int]:
    """Slabs that a worker receives in time for the update."""
    steps = program.instructions[rank]
    early = steps[: steps.index(GlobalNorm())]
    return {step.slab for step in early if isinstance(step, RecvState)}


def rewritten(
    executor: Executor, program: Program, change: Callable[[list[Instruction]], Any]
) -> Program:
    """The program with this worker's list changed in place."""
    lists = list(program.instructions)
    steps = list(lists[executor.world.rank])
    change(steps)
    lists[executor.world.rank] = tuple(steps)
    return replace(program, instructions=tuple(lists))


Around = Callable[[Executor, Slab, Callable[[], None]], None]


def wrap_update(executor: Executor, program: Program, around: Around) -> Program:
    """Run ``around(executor, slab, honest update)`` where this worker updates what it joined."""
    slabs = joined(program, executor.world.rank)
    handler = executor.handlers[UpdateOrSkip]

    def update(run: Any, op: UpdateOrSkip) -> None:
        def honest() -> None:
            handler(run, op)

        if op.slab not in slabs:
            return honest()
        executor.custody.usable(op.slab)
        return around(executor, executor.holdings.slabs[op.slab], honest)

    executor.handlers[UpdateOrSkip] = update
    return program


# -- on the joiner alone -----------------------------------------------------------------------


def moments_are_lost(executor: Executor, program: Program) -> Program:
    """What the authors' published code does at every switch."""

    def around(_: Executor, slab: Slab, honest: Callable[[], None]) -> None:
        slab.exp_avg.zero_()
        slab.exp_avg_sq.zero_()
        honest()

    return wrap_update(executor, program, around)


def moments_of_one_bias_are_lost(executor: Executor, program: Program) -> Program:
    def around(_: Executor, slab: Slab, honest: Callable[[], None]) -> None:
        for entry in slab.layout.entries:
            if entry.name == "decoder.layers.0.mlp.linear_fc2.bias":
                slab.view(slab.exp_avg, entry).zero_()
                slab.view(slab.exp_avg_sq, entry).zero_()
        honest()

    return wrap_update(executor, program, around)


def the_step_count_is_lost(executor: Executor, program: Program) -> Program:
    def around(executor: Executor, _: Slab, honest: Callable[[], None]) -> None:
        updates, executor.holdings.updates = executor.holdings.updates, 0
        honest()
        executor.holdings.updates = updates

    return wrap_update(executor, program, around)


def biases_decay(executor: Executor, program: Program) -> Program:
    def around(_: Executor, slab: Slab, honest: Callable[[], None]) -> None:
        layout, slab.layout = slab.layout, replace(slab.layout, decayed=slab.layout.numel)
        honest()
        slab.layout = layout

    return wrap_update(executor, program, around)


def the_clip_factor_is_missing(executor: Executor, program: Program) -> Program:
    def around(executor: Executor, _: Slab, honest: Callable[[], None]) -> None:
        optimizer = executor.optimizer
        executor.optimizer = replace(optimizer, clip_grad=0.0)
        honest()
        executor.optimizer = optimizer

    return wrap_update(executor, program, around)


def the_update_is_missing(executor: Executor, program: Program) -> Program:
    lost = [UpdateOrSkip(slab) for slab in joined(program, executor.world.rank)]

    def change(steps: list[Instruction]) -> None:
        steps[:] = [step for step in steps if step not in lost]

    return rewritten(executor, program, change)


def the_update_comes_twice(executor: Executor, program: Program) -> Program:
    def around(_: Executor, slab: Slab, honest: Callable[[], None]) -> None:
        gradient = slab.grads.clone()
        honest()
        slab.grads.copy_(gradient)
        honest()

    return wrap_update(executor, program, around)


def the_joiner_contributes_a_gradient(executor: Executor, program: Program) -> Program:
    """Memory that another slab left behind."""
    slabs = joined(program, executor.world.rank)
    honest = executor.handlers[ReduceGradient]

    def reduce(run: Any, op: ReduceGradient) -> None:
        if op.slab in slabs:
            executor.holdings.slabs[op.slab].grads[:20] = 1e-3
        honest(run, op)

    executor.handlers[ReduceGradient] = reduce
    return program


def the_joiner_counts_the_norm_again(executor: Executor, program: Program) -> Program:
    slabs = joined(program, executor.world.rank)
    more = [SquaredNorm(slab) for slab in slabs]

    def change(steps: list[Instruction]) -> None:
        at = steps.index(GlobalNorm())
        steps[at:at] = more

    return rewritten(executor, program, change)


# -- on the others -----------------------------------------------------------------------------


def the_joiner_is_left_out_of_the_reduction(executor: Executor, program: Program) -> Program:
    """It updates with a gradient of zero."""
    joiners = {rank: joined(program, rank) for rank in range(executor.world.size)}

    def change(steps: list[Instruction]) -> None:
        for at, step in reversed(list(enumerate(steps))):
            if isinstance(step, ReduceGradient):
                group = tuple(d for d in step.group if step.slab not in joiners[d])
                if len(group) > 1 and executor.world.rank in group:
                    steps[at] = replace(step, group=group)
                else:
                    del steps[at]

    return rewritten(executor, program, change)


def early_state_leaves_after_the_update(executor: Executor, program: Program) -> Program:
    """The joiner then makes the update a second time."""

    def change(steps: list[Instruction]) -> None:
        steps.sort(key=lambda step: isinstance(step, SendState))

    return rewritten(executor, program, change)


def a_micro_batch_is_missed(executor: Executor, program: Program) -> Program:
    return jobs.inject("missed micro-batch", executor, program, first=True)


def a_norm_is_counted_twice(executor: Executor, program: Program) -> Program:
    broken = jobs.inject("norm counted twice", executor, program, first=True)
    for slab in executor.holdings:  # in this iteration only

        def once(part: Any = None, slab: Slab = slab, count: Any = slab.squared_norm) -> Any:
            vars(slab).pop("squared_norm", None)
            return count(part)

        slab.squared_norm = once  # type: ignore[method-assign]
    return broken


EARLY: list[Any] = [
    moments_are_lost,
    moments_of_one_bias_are_lost,
    the_step_count_is_lost,
    biases_decay,
    the_clip_factor_is_missing,
    the_update_is_missing,
    the_update_comes_twice,
    the_joiner_contributes_a_gradient,
    the_joiner_counts_the_norm_again,
    the_joiner_is_left_out_of_the_reduction,
    early_state_leaves_after_the_update,
    a_micro_batch_is_missed,
    a_norm_is_counted_twice,
]
NEEDS_KEEPING = {early_state_leaves_after_the_update}  # there is no update where it is dropped


# -- where a slab is given up ------------------------------------------------------------------


def the_slab_is_dropped_before_its_reduction(executor: Executor, program: Program) -> Program:
    """Its gradient is lost, and what the reduction finds there is not it."""
    dropped = {s.slab for s in program.instructions[executor.world.rank] if isinstance(s, Drop)}
    honest = executor.handlers[ReduceGradient]

    def reduce(run: Any, op: ReduceGradient) -> None:
        if op.slab in dropped:
            executor.holdings.slabs[op.slab].grads.zero_()
        honest(run, op)

    executor.handlers[ReduceGradient] = reduce
    return program


def the_hand_over_leaves_before_the_update(executor: Executor, program: Program) -> Program:
    def change(steps: list[Instruction]) -> None:
        early = [step for step in steps if isinstance(step, SendState)]
        rest = [step for step in steps if not isinstance(step, SendState)]
        at = rest.index(GlobalNorm()) + 1
        steps[:] = rest[:at] + early + rest[at:]

    return rewritten(executor, program, change)


def the_hand_over_is_updated_again(executor: Executor, program: Program) -> Program:
    def change(steps: list[Instruction]) -> None:
        steps.extend([UpdateOrSkip(s.slab) for s in steps if isinstance(s, RecvState)])

    return rewritten(executor, program, change)


def the_hand_over_loses_the_moments(executor: Executor, program: Program) -> Program:
    honest = executor.handlers[SendState]

    def send(run: Any, op: SendState) -> None:
        slab = executor.holdings.slabs[op.slab]
        slab.exp_avg.zero_()
        slab.exp_avg_sq.zero_()
        honest(run, op)

    executor.handlers[SendState] = send
    return program


def compare(
    workers: WorkerPool, plans: list[str], way: str, fault: jobs.Fault, **options: Any
) -> None:
    """Fails if the broken run differs from one process's."""
    expected = reference(workers, TIED, iterations=ITERATIONS)
    got = workers.run(
        3, jobs.train, TIED, plans, ITERATIONS, way=way, fault=fault, fault_when="switch", **options
    )
    jobs.assert_same(jobs.merge(got), expected)


def nothing(executor: Executor, program: Program) -> Program:
    """No fault."""
    return wrap_update(executor, program, lambda _, slab, honest: honest())


@pytest.mark.parametrize("way", ["early", "late"])
@pytest.mark.parametrize("plans", [KEEPING, MIGRATION])
def test_without_a_fault_the_comparison_passes(
    workers: WorkerPool, plans: list[str], way: str
) -> None:
    compare(workers, plans, way, nothing)


@pytest.mark.parametrize("fault", EARLY, ids=lambda f: f.__name__)
def test_a_fault_in_an_early_join_is_noticed(workers: WorkerPool, fault: jobs.Fault) -> None:
    with pytest.raises(AssertionError, match=NOTICED):
        compare(workers, KEEPING if fault in NEEDS_KEEPING else MIGRATION, "early", fault)


@pytest.mark.parametrize(
    ("fault", "way"),
    [
        (the_slab_is_dropped_before_its_reduction, "early"),
        (the_hand_over_leaves_before_the_update, "late"),
        (the_hand_over_is_updated_again, "late"),
        (the_hand_over_loses_the_moments, "late"),
    ],
)
def test_a_fault_in_giving_up_a_slab_is_noticed(
    workers: WorkerPool, fault: jobs.Fault, way: str
) -> None:
    with pytest.raises(AssertionError, match=NOTICED):
        compare(workers, MIGRATION, way, fault)


def masters_stay_behind(executor: Executor, program: Program) -> Program:
    """As if only the rounded parameters travelled."""

    def around(_: Executor, slab: Slab, honest: Callable[[], None]) -> None:
        slab.master.copy_(slab.params)
        honest()

    return wrap_update(executor, program, around)


def test_masters_that_do_not_travel_are_noticed(workers: WorkerPool) -> None:
    config = replace(TIED, num_layers=2, params_dtype="bfloat16")
    options = {"iterations": ITERATIONS, "exact": True}
    expected = reference(workers, config, **options)
    plans = [plan.replace("4:8", "4:6") for plan in MIGRATION]
    for fault in (nothing, masters_stay_behind):
        got = workers.run(3, jobs.train, config, plans, **options, fault=fault, fault_when="switch")
        if fault is nothing:
            jobs.assert_equal_bits(jobs.merge(got), expected)
        else:
            with pytest.raises(AssertionError, match=NOTICED):
                jobs.assert_equal_bits(jobs.merge(got), expected)


# -- a worker is killed ------------------------------------------------------------------------

#: Worker 2 joins in the fourth iteration; worker 0 gives up some of what it has.
SCRIPT = "0:3@0 | 3:6@1\n" * 4 + "0:2@0 | 2:4@1 | 4:6@2\n"
KINDS: dict[str, type[Instruction]] = {
    c.__name__: c for c in (RecvState, SendState, ReduceGradient, GlobalNorm, UpdateOrSkip, Drop)
}
GROUP = "a group that is being made"


def killed_at(place: str, victim: int, rank: int) -> None:
    """Worker ``victim`` is killed when it comes to a place of the first switch."""
    if rank != victim:
        return
    if place == GROUP:  # no group is made before: there is one replica

        def make(self: ReductionGroups, ranks: tuple[int, ...], number: int) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        ReductionGroups._make = make  # type: ignore[method-assign]
        return
    kind, honest = KINDS[place], Executor.run

    def run(self: Executor, part: Part, inputs: StepInputs) -> StepResult:
        if part.next_plan is not None:
            self.handlers[kind] = lambda run, op: os.kill(os.getpid(), signal.SIGKILL)
        return honest(self, part, inputs)

    Executor.run = run  # type: ignore[method-assign]


def switching(directory: Path) -> list[str]:
    plans = directory / "plans.txt"
    plans.write_text(SCRIPT)
    return [*FLAGS, "--flexpipe-plans", str(plans), "--flexpipe-no-twin"]


@pytest.mark.parametrize(
    ("place", "victim"),
    [
        # The others wait for a group with the victim, to which they have no connection in it yet.
        ("RecvState", 2),
        pytest.param(GROUP, 2, marks=pytest.mark.soak),
        pytest.param("SendState", 0, marks=pytest.mark.soak),
        pytest.param("ReduceGradient", 2, marks=pytest.mark.soak),
        ("GlobalNorm", 2),
        pytest.param("UpdateOrSkip", 2, marks=pytest.mark.soak),
        pytest.param("Drop", 1, marks=pytest.mark.soak),
    ],
)
def test_a_worker_killed_during_a_switch_ends_the_job(
    tmp_path: Path, place: str, victim: int
) -> None:
    with Job(tmp_path / "job") as job:
        flags = [*switching(tmp_path), "--train-iters", "100000"]
        before = partial(killed_at, place, victim)
        job.start("pretrain_gpt.py", flags, size=3, before=before)
        job.processes[victim].join(60)
        start = time.monotonic()
        expected = [EXIT_PEER_LOST] * 3
        expected[victim] = -signal.SIGKILL
        assert job.wait() == expected
        assert time.monotonic() - start < SECONDS
        assert "iteration        3/" in job.output
        assert ("iteration        4/" in job.output) is (place == "Drop")
    for peer in {0, 1, 2} - {victim}:
        errors = re.findall("^error: .*", job.text(peer), re.MULTILINE)
        assert len(errors) == 1
        assert re.match(rf"error: worker {peer}: '[^']+' failed", errors[0])
    assert "Traceback" not in job.output


def test_after_a_kill_during_a_switch_the_last_checkpoint_loads(tmp_path: Path) -> None:
    flags = [*switching(tmp_path), *saving(tmp_path / "checkpoints", 2), "--train-iters", "6"]
    with Job(tmp_path / "job") as job:
        job.start("pretrain_gpt.py", flags, size=3, before=partial(killed_at, "SendState", 1))
        assert job.wait() == [EXIT_PEER_LOST, -signal.SIGKILL, EXIT_PEER_LOST]
    assert latest(tmp_path / "checkpoints") == 2
    with Job(tmp_path / "again") as job:
        assert job.start("pretrain_gpt.py", flags, size=3).wait() == [0, 0, 0]
        assert "iteration        2/" not in job.output
        for iteration in (3, 4, 5, 6):  # the switch is made now
            assert f"iteration        {iteration}/" in job.output
    assert latest(tmp_path / "checkpoints") == 6
