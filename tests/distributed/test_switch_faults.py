"""Faults during a switch alone: the comparison with one process must notice each of them.

Three workers train on one plan, switch in the second iteration, and go on. Only that iteration is
broken, mostly only on the worker that joins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_flex.runtime.executor import HANDLERS, Executor
from megatron_flex.runtime.slab import Slab
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
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import TIED, reference

#: Slabs 0 to 3 go to worker 2, which has none; 4 to 7 stay on 1; the tied embedding is on all.
KEEPING = ["0:4@0 | 4:8@1", "0:4@0 | 4:8@1", "0:4@2,0 | 4:8@1"]
#: Worker 0 gives up what worker 2 gets.
MIGRATION = ["0:4@0 | 4:8@1", "0:4@0 | 4:8@1", "0:4@2 | 4:8@1"]
ITERATIONS = 5


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


def wrap_update(
    executor: Executor, program: Program, around: Callable[[Executor, Slab, Callable[[], None]], None]
) -> Program:
    """Run ``around(executor, slab, honest update)`` where this worker updates what it joined."""
    slabs = joined(program, executor.world.rank)

    def update(executor: Executor, run: Any, op: UpdateOrSkip) -> None:
        def honest() -> None:
            Executor._update_or_skip(executor, run, op)

        if op.slab not in slabs:
            return honest()
        executor._wait_arrived(op.slab)
        return around(executor, executor.holdings.slabs[op.slab], honest)

    HANDLERS[UpdateOrSkip] = update
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
    slabs = joined(program, executor.world.rank)
    lost = [UpdateOrSkip(slab) for slab in slabs]
    return rewritten(executor, program, lambda steps: [steps.remove(update) for update in lost])


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

    def reduce(executor: Executor, run: Any, op: ReduceGradient) -> None:
        if op.slab in slabs:
            executor.holdings.slabs[op.slab].grads[:20] = 1e-3
        Executor._reduce(executor, run, op)

    HANDLERS[ReduceGradient] = reduce
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
        late = [step for step in steps if isinstance(step, SendState)]
        steps[:] = [step for step in steps if not isinstance(step, SendState)] + late

    return rewritten(executor, program, change)


def a_micro_batch_is_missed(executor: Executor, program: Program) -> Program:
    return jobs.inject("missed micro-batch", executor.holdings, program, 0, first=True)


def a_norm_is_counted_twice(executor: Executor, program: Program) -> Program:
    broken = jobs.inject("norm counted twice", executor.holdings, program, 0, first=True)
    for slab in executor.holdings:  # in this iteration only

        def once(slab: Slab = slab, count: Callable[[], torch.Tensor] = slab.squared_norm) -> Any:
            vars(slab).pop("squared_norm", None)
            return count()

        slab.squared_norm = once  # type: ignore[method-assign]
    return broken


ANY = {
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
}
NEEDS_KEEPING = {early_state_leaves_after_the_update}  # there is no update where it is dropped


# -- where a slab is given up ------------------------------------------------------------------


def the_slab_is_dropped_before_its_reduction(executor: Executor, program: Program) -> Program:
    """Its gradient is lost, and what the reduction finds there is not it."""
    dropped = {s.slab for s in program.instructions[executor.world.rank] if isinstance(s, Drop)}

    def reduce(executor: Executor, run: Any, op: ReduceGradient) -> None:
        if op.slab in dropped:
            executor.holdings.slabs[op.slab].grads.zero_()
        Executor._reduce(executor, run, op)

    HANDLERS[ReduceGradient] = reduce
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
    def send(executor: Executor, run: Any, op: SendState) -> None:
        slab = executor.holdings.slabs[op.slab]
        slab.exp_avg.zero_()
        slab.exp_avg_sq.zero_()
        Executor._send_state(executor, run, op)

    HANDLERS[SendState] = send
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


@pytest.mark.parametrize("fault", sorted(ANY, key=lambda f: f.__name__), ids=lambda f: f.__name__)
def test_a_fault_in_an_early_join_is_noticed(workers: WorkerPool, fault: jobs.Fault) -> None:
    with pytest.raises(AssertionError, match="(loss|norm) of iteration|differs by|disagree"):
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
    with pytest.raises(AssertionError, match="(loss|norm) of iteration|differs by|disagree"):
        compare(workers, MIGRATION, way, fault)
