"""A run that is interrupted and resumed, on the same or on another layout, goes on exactly."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_flex.checkpoint.load import load
from megatron_flex.checkpoint.save import save
from megatron_flex.data.microbatches import CostCoefficients, cut_by_tokens
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.plan import Plan
from megatron_flex.programs import build_program
from megatron_flex.runtime.executor import Executor, StepInputs, StepResult, reduction_groups
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.world import World
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


def _train(
    config: ModelConfig,
    plan_text: str,
    first: int,
    last: int,
    directory: str,
    *,
    fault: str = "",
) -> Outcome:
    """Iterations ``first`` to ``last``: resumed from ``directory`` unless 0, saved there at the end."""
    world = World.create(torch.device("cpu"), timedelta(seconds=30))
    group = new_group() if world.size > 1 else None
    plan = Plan.parse(plan_text)
    holdings = Holdings(config, plan, world.rank, world.device)
    model = asdict(config)
    if first:
        for slab in holdings:
            slab.state.fill_(float("nan"))  # nothing of a fresh start may survive
        common = load(
            directory, holdings.named_state(owned=False), iteration=first, group=group, model=model
        )
        assert common["iteration"] == first
        holdings.updates = 0 if fault == "lost step count" else common["updates"]
        for slab in holdings:
            if fault == "lost moments":
                slab.exp_avg.zero_()
            _clear_padding(slab)
    executor = Executor(world, holdings, OptimizerConfig(adam_eps=ADAM_EPS))
    results: list[StepResult] = []
    for iteration in range(first, last):
        batch = batch_of(iteration)
        batch = replace(batch, denominators=(int(batch.lengths.sum()),))
        parts = cut_by_tokens(batch, 40, CostCoefficients())
        program = build_program(config, plan, parts, world.size)
        if world.reductions is not None:
            world.reductions.prepare(reduction_groups([program]))
        inputs = StepInputs(
            lambda m, inputs, targets, parts=parts: packed(config, parts[m], frozenset()),
            batch.denominators,
            StepSize(learning_rate=1e-3, weight_decay=0.1),
        )
        results.append(executor.run(program, inputs))
    executor.settle()
    state = {name: tensor.clone() for name, tensor in holdings.named_state(owned=True).items()}
    if last < WHOLE:
        common = {"iteration": last, "updates": holdings.updates, "model": model}
        save(directory, last, holdings.named_state(owned=True), common, group=group)
    return Outcome(tuple(results), state, holdings.updates)


def _clear_padding(slab: object) -> None:
    """The gaps between parameters are zero from the start and stay so."""
    for buffer in (slab.master, slab.exp_avg, slab.exp_avg_sq):  # type: ignore[attr-defined]
        buffer.nan_to_num_(nan=0.0)


def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(
    workers: WorkerPool, tmp_path: Path
) -> None:
    whole = merge(workers.run(3, _train, TINY, UNEVEN, 0, WHOLE, str(tmp_path)))
    half = merge(workers.run(3, _train, TINY, UNEVEN, 0, HALF, str(tmp_path)))
    rest = merge(workers.run(3, _train, TINY, UNEVEN, HALF, WHOLE, str(tmp_path)))
    assert half[0] + rest[0] == whole[0]
    assert rest[1].keys() == whole[1].keys()
    for name, tensor in whole[1].items():
        assert torch.equal(rest[1][name], tensor), name


def test_three_workers_on_an_uneven_plan_are_resumed_by_one_two_four_and_five(
    workers: WorkerPool, tmp_path: Path
) -> None:
    merge(workers.run(3, _train, TINY, UNEVEN, 0, HALF, str(tmp_path)))
    expected = merge(workers.run(3, _train, TINY, UNEVEN, HALF, WHOLE, str(tmp_path)))
    for world, plan in (
        (1, "0:8@0"),
        (2, "0:8@0,1"),
        (4, "0:3@0 | 3:8@1-3"),
        (5, "0:1@4 | 1:4@0,1 | 4:8@2,3"),
    ):
        outcomes = workers.run(world, _train, TINY, plan, HALF, WHOLE, str(tmp_path))
        assert_same(merge(outcomes), expected)


def test_mixed_precision_resumes_bit_for_bit(workers: WorkerPool, tmp_path: Path) -> None:
    config = replace(TINY, params_dtype="bfloat16")
    plan = "0:4@0 | 4:8@1"
    whole = merge(workers.run(2, _train, config, plan, 0, WHOLE, str(tmp_path)))
    half = merge(workers.run(2, _train, config, plan, 0, HALF, str(tmp_path)))
    rest = merge(workers.run(2, _train, config, plan, HALF, WHOLE, str(tmp_path)))
    assert half[0] + rest[0] == whole[0]
    assert any(name.startswith("optimizer.state.master.") for name in whole[1])
    assert all(torch.equal(rest[1][name], tensor) for name, tensor in whole[1].items())


@pytest.mark.parametrize("fault", ["lost moments", "lost step count"])
def test_a_resume_that_loses_state_is_noticed(
    workers: WorkerPool, tmp_path: Path, fault: str
) -> None:
    merge(workers.run(1, _train, TINY, "0:8@0", 0, HALF, str(tmp_path)))
    expected = merge(workers.run(1, _train, TINY, "0:8@0", HALF, WHOLE, str(tmp_path)))
    broken = merge(workers.run(1, _train, TINY, "0:8@0", HALF, WHOLE, str(tmp_path), fault=fault))
    losses = [[step.losses for step in run[0]] for run in (broken, expected)]
    assert not np.allclose(losses[0], losses[1], rtol=1e-6, atol=0)
    with pytest.raises(AssertionError, match="loss of iteration"):
        assert_same(broken, expected)
