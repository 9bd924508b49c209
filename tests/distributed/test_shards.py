"""Optimizer state that is split over replicas changes what a worker keeps, not what it computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_flex.model.config import ModelConfig
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.slab import Slab
from megatron_flex.schedule.instructions import GatherParameters, Program, UpdateOrSkip
from tests.distributed import jobs
from tests.distributed.jobs import BERT
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import TIED, UNTIED, reference
from tests.distributed.test_switching import WAYS, random_plan

MIXED = replace(TIED, num_layers=2, params_dtype="bfloat16")


def same(
    workers: WorkerPool, config: ModelConfig, plans: Any, size: int, iterations: int, **options: Any
) -> None:
    """As one process: to rounding, or to the bit with exact sums."""
    common = {k: v for k, v in options.items() if k in ("exact", "masked", "evaluate")}
    expected = reference(workers, config, iterations=iterations, **common)
    got = jobs.merge(workers.run(size, jobs.train, config, plans, iterations, **options))
    if options.get("exact"):
        jobs.assert_equal_bits(got, expected)
    else:
        jobs.assert_same(got, expected)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("config", "plan", "size"),
    [
        (TIED, "0:8@0,1 ; shard 0-7", 2),
        (TIED, "0:4@0,1 | 4:8@2 ; shard 1-3", 3),  # the tied embedding is not
        (TIED, "0:3@3 | 3:8@0,1,2 ; shard 0-7", 4),  # uneven parts; the tied one by four
        (UNTIED, "0:8@0,1,2 ; shard 0-7", 3),
        (UNTIED, "0:8@0,1,2,3 ; shard 0,2,5-7", 4),
        (UNTIED, "0:2@0,1 | 2:5@2 | 5:8@0,1 ; shard 0-7", 3),
        (BERT, "0:3@1,0 | 3:6@2,3 ; shard 0-5", 4),
    ],
)
def test_static_sharded_plans_equal_one_process(
    workers: WorkerPool, config: ModelConfig, plan: str, size: int, exact: bool
) -> None:
    same(workers, config, plan, size, 4, exact=exact)


@pytest.mark.parametrize("size", [2, 3])
def test_reduced_and_scattered_gradients_give_the_same(workers: WorkerPool, size: int) -> None:
    plan = f"0:8@0-{size - 1} ; shard 0-7"
    plain = jobs.merge(workers.run(size, jobs.train, UNTIED, plan, 6))
    jobs.assert_same(
        jobs.merge(workers.run(size, jobs.train, UNTIED, plan, 6, scatter=True)), plain
    )


@pytest.mark.parametrize("plan", ["0:6@0,1 ; shard 0-5", "0:6@0,1,2 ; shard 0-5"])
def test_a_sharded_bfloat16_model_gives_the_same_bits(workers: WorkerPool, plan: str) -> None:
    same(workers, MIXED, plan, 3, 6, exact=True)


@pytest.mark.parametrize(
    "plan", ["0:8@0,1 ; shard 1,2 ; optimizer 4,5", "0:8@0,1 ; shard 0-7 ; recompute 1-3"]
)
def test_sharding_goes_with_other_memory_optimisation(workers: WorkerPool, plan: str) -> None:
    same(workers, TIED, plan, 2, 5, exact=True)


def zeros(exact: bool, plan: str) -> list[int | None]:
    outcome = jobs.train(UNTIED, plan, 3, exact=exact, count_zeros=True)
    return [r.zeros for r in outcome.results]


@pytest.mark.parametrize("exact", [False, True])
def test_zeros_are_counted_once(workers: WorkerPool, exact: bool) -> None:
    expected = workers.run(1, zeros, exact, "0:8@0")[0]
    assert all(expected)
    assert workers.run(3, zeros, exact, "0:8@0,1,2 ; shard 0-7") == [expected] * 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "plans",
    [
        ["0:8@0,1", "0:8@0,1 ; shard 0-7", "0:8@0,1", "0:8@0,1 ; shard 3,4"],  # on and off
        ["0:8@0,1,2 ; shard 0-7", "0:8@0,1 ; shard 0-7", "0:8@2,1 ; shard 0-7"],  # drop, swap
        [
            "0:4@0 | 4:8@1,2 ; shard 0-7",
            "0:4@0,1 | 4:8@2 ; shard 0-7",
            "0:8@1",
            "0:8@0,2 ; shard 0",
        ],
        ["0:8@0,1 ; shard 0-7", "0:8@0,1 ; optimizer 0-7", "0:8@1,2 ; shard 0-7"],  # host
    ],
)
def test_parts_are_cut_anew_between_plans(workers: WorkerPool, plans: list[str], way: str) -> None:
    # Each plan for two iterations.
    doubled = [plan for plan in plans for _ in range(2)]
    same(workers, TIED, doubled, 3, 2 * len(plans), way=way)


def random_plans(seed: int, units: int, devices: int, length: int) -> list[str]:
    """Any plans; of each unit the optimizer state stays, is sharded, or lives on the host."""
    rng = random.Random(seed)
    plans: list[str] = []
    plan = str(random_plan(rng, units, devices))
    while len(plans) < length:
        if rng.random() < 0.6:
            plan = str(random_plan(rng, units, devices))
        chosen = [rng.choice(["shard", "shard", "optimizer", ""]) for _ in range(units)]
        text = plan
        for name in ("shard", "optimizer"):
            listed = ",".join(str(u) for u, what in enumerate(chosen) if what == name)
            text += f" ; {name} {listed}" if listed else ""
        plans.append(plans[-1] if plans and rng.random() < 0.3 else text)
    return plans


def test_random_sequences_of_sharded_plans_equal_one_process(
    workers: WorkerPool, count: Callable[[int, int], int]
) -> None:
    length = count(5, 8)
    for seed in range(count(6, 200)):
        config = (TIED, UNTIED, BERT)[seed % 3]
        devices = 2 + seed % (3 if seed < 6 else 5)
        plans = random_plans(seed, config.layers.num_units, devices, length)
        way, migrate = WAYS[seed // 2 % 3], seed % 2 == 1
        try:
            same(workers, config, plans, devices, length, way=way, migrate=migrate)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, plans {plans}, {way}: {error}") from error


@pytest.mark.parametrize("config", [replace(TIED, num_layers=2), MIXED])
def test_random_sequences_of_sharded_plans_give_the_same_bits(
    workers: WorkerPool, config: ModelConfig
) -> None:
    for devices in (2, 3, 4):
        plans = random_plans(devices, config.layers.num_units, devices, 6)
        same(workers, config, plans, devices, 6, exact=True, way="mixed")


def test_a_skipped_update_still_cuts_anew(workers: WorkerPool) -> None:
    masked = frozenset(range(8, 24))
    plans = ["0:8@0,1 ; shard 0-7", "0:8@0,1 ; shard 0-7", "0:8@1,2 ; shard 0-7", "0:8@0,1,2"]
    same(workers, TIED, plans, 3, 5, masked=masked)


def test_evaluations_between_sharded_plans_change_nothing(workers: WorkerPool) -> None:
    plans = ["0:8@0,1 ; shard 0-7", "0:8@1,2 ; shard 0-7", "0:4@0,2 | 4:8@1 ; shard 0-7", "0:8@2"]
    same(workers, TIED, plans, 3, 4, evaluate=True)


# -- what would go wrong is noticed ------------------------------------------------------------


def the_gather_is_left_out(executor: Executor, program: Program) -> Program:
    executor.handlers[GatherParameters] = lambda run, op: None
    return program


def a_part_is_updated_twice(executor: Executor, program: Program) -> Program:
    honest = executor.handlers[UpdateOrSkip]

    def twice(run: Any, op: UpdateOrSkip) -> None:
        slab = executor.holdings.slabs[op.slab]
        grads = slab.grads.clone()
        honest(run, op)
        if op.slab == 2 and executor.world.rank == 1:
            slab.grads.copy_(grads)
            honest(run, op)

    executor.handlers[UpdateOrSkip] = twice
    return program


def a_piece_is_lost(executor: Executor, program: Program) -> Program:
    honest = executor.holdings.install

    def install(new: Slab) -> None:
        if new.index == 2:
            with torch.no_grad():
                new.exp_avg.zero_()
        honest(new)

    executor.holdings.install = install  # type: ignore[method-assign]
    return program


@pytest.mark.parametrize(
    ("fault", "when"),
    [
        (the_gather_is_left_out, "always"),
        (a_part_is_updated_twice, "always"),
        (a_piece_is_lost, "switch"),
    ],
)
def test_the_comparison_notices(workers: WorkerPool, fault: Any, when: str) -> None:
    plans = [*["0:8@0,1 ; shard 0-7"] * 4, "0:8@0,1,2 ; shard 0-7"]
    expected = reference(workers, TIED, iterations=10)
    broken = workers.run(3, jobs.train, TIED, plans, 10, fault=fault, fault_when=when)
    with pytest.raises(AssertionError, match=r"iteration \d|differs by"):
        jobs.assert_same(jobs.merge(broken), expected)
