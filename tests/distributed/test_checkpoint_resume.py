"""A run that is interrupted and resumed, on the same or on another layout, goes on exactly."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flex.checkpoint.load import load
from megatron_flex.checkpoint.save import save
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.data.microbatches import CostCoefficients, cut_by_tokens
from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.plan import Plan
from megatron_flex.programs import build_program
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.step import StepInputs, StepResult
from megatron_flex.runtime.world import World
from megatron_flex.schedule.compact import groups_of
from megatron_flex.schedule.part import part_of
from tests.distributed.jobs import (
    ADAM_EPS,
    TINY,
    Outcome,
    assert_same,
    batch_of,
    merge,
    packed,
)
from tests.distributed.pool import WorkerPool
from tests.distributed.test_checkpoint import new_group

UNEVEN = "0:2@0,2 | 2:7@1 | 7:8@2"
HALF, WHOLE = 5, 10

Run = tuple[tuple[StepResult, ...], dict[str, torch.Tensor]]


def _train(
    config: ModelConfig, plan_text: str, first: int, directory: str, fault: str = ""
) -> Outcome:
    """Train to the end: from the start, saving half way, or resumed from there."""
    world = World.create(torch.device("cpu"), timedelta(seconds=30))
    group = new_group() if world.size > 1 else None
    plan = Plan.parse(plan_text)
    holdings = Holdings(config, plan, world.rank, world.device)
    model = asdict(config)
    if first:
        wanted = holdings.named_state(owned=False)
        for tensor in wanted.values():
            tensor.detach().fill_(float("nan"))  # nothing of a fresh start may survive
        common = load(directory, wanted, group=group, model=model)
        assert common["iteration"] == first
        holdings.updates = 0 if fault == "lost step count" else common["updates"]
        for slab in holdings if fault == "lost moments" else ():
            slab.exp_avg.zero_()
    executor = Executor(world, holdings, OptimizerConfig(adam_eps=ADAM_EPS))
    results = []
    for iteration in range(first, WHOLE):
        if iteration == HALF and not first:
            state = holdings.named_state(owned=True)
            common = {"iteration": HALF, "updates": holdings.updates, "model": model}
            save(directory, HALF, state, common, group=group)
        results.append(_step(executor, config, plan, iteration))
    executor.settle()
    state = {name: tensor.clone() for name, tensor in holdings.named_state(owned=True).items()}
    return Outcome(tuple(results), state, holdings.updates, config, 1)


def _step(executor: Executor, config: ModelConfig, plan: Plan, iteration: int) -> StepResult:
    batch = batch_of(iteration)
    batch = replace(batch, denominators=(int(batch.lengths.sum()),))
    parts: tuple[MicroBatch, ...] = cut_by_tokens(batch, 40, CostCoefficients())
    program = build_program(config, plan, parts, executor.world.size)
    if executor.world.reductions is not None:
        executor.world.reductions.prepare(set(groups_of(program.instructions)))

    def load_batch(number: int, *_: Any) -> PackedBatch:
        return packed(config, parts[number], frozenset())

    step = StepSize(learning_rate=1e-3, weight_decay=0.1)
    return executor.run(
        part_of(program, executor.world.rank), StepInputs(load_batch, batch.denominators, step)
    )


@pytest.fixture(scope="module")
def uneven(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    """A run of three workers on an uneven plan that saved half way: directory and outcome."""
    directory = str(tmp_path_factory.mktemp("uneven"))
    return directory, merge(workers.run(3, _train, TINY, UNEVEN, 0, directory))


def assert_bitwise(rest: Run, whole: Run) -> None:
    """The second half has the very bits of the run that was not interrupted."""
    assert rest[0] == whole[0][HALF:]
    assert rest[1].keys() == whole[1].keys()
    for name, tensor in whole[1].items():
        assert torch.equal(rest[1][name], tensor), name


def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(
    workers: WorkerPool, uneven: tuple[str, Run]
) -> None:
    directory, whole = uneven
    assert_bitwise(merge(workers.run(3, _train, TINY, UNEVEN, HALF, directory)), whole)


def test_three_workers_on_an_uneven_plan_are_resumed_by_one_two_four_and_five(
    workers: WorkerPool, uneven: tuple[str, Run]
) -> None:
    directory, whole = uneven
    for world, plan in (
        (1, "0:8@0"),
        (2, "0:8@0,1"),
        (4, "0:3@0 | 3:8@1-3"),
        (5, "0:1@4 | 1:4@0,1 | 4:8@2,3"),
    ):
        rest = merge(workers.run(world, _train, TINY, plan, HALF, directory))
        assert_same(rest, (whole[0][HALF:], whole[1]))


def test_mixed_precision_resumes_bit_for_bit(workers: WorkerPool, tmp_path: Path) -> None:
    config, plan = replace(TINY, params_dtype="bfloat16"), "0:4@0 | 4:8@1"
    whole = merge(workers.run(2, _train, config, plan, 0, str(tmp_path)))
    assert any(name.startswith("optimizer.state.master.") for name in whole[1])
    assert_bitwise(merge(workers.run(2, _train, config, plan, HALF, str(tmp_path))), whole)


@pytest.mark.parametrize("fault", ["lost moments", "lost step count"])
def test_a_resume_that_loses_state_is_noticed(
    workers: WorkerPool, uneven: tuple[str, Run], fault: str
) -> None:
    directory, whole = uneven
    broken = merge(workers.run(1, _train, TINY, "0:8@0", HALF, directory, fault))
    with pytest.raises(AssertionError, match="loss of iteration"):
        assert_same(broken, (whole[0][HALF:], whole[1]))
