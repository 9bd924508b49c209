"""Any plan to any plan, between iterations: training equals one process that never switches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.schedule.list_scheduler import POLICIES
from tests.distributed import jobs
from tests.distributed.jobs import BERT
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import TIED, UNTIED, reference

WAYS = ("early", "late", "mixed")


def random_plan(rng: random.Random, units: int, devices: int) -> Plan:
    """Any cut, any groups: permuted, overlapping, with idle devices and several stages a device."""
    count = rng.randint(1, min(units, devices + 1))
    cuts = [0, *sorted(rng.sample(range(1, units), count - 1)), units]
    stages = (
        Stage(a, b, tuple(rng.sample(range(devices), rng.randint(1, devices))))
        for a, b in pairwise(cuts)
    )
    return Plan(tuple(stages))


def random_plans(seed: int, units: int, devices: int, length: int) -> list[str]:
    """A sequence of plans; about a third of the iterations keep the plan before."""
    rng = random.Random(seed)
    plans = [random_plan(rng, units, devices)]
    while len(plans) < length:
        plans.append(plans[-1] if rng.random() < 0.3 else random_plan(rng, units, devices))
    return [str(p) for p in plans]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("plans", "size"),
    [
        (["0:8@0,1", "0:4@0 | 4:8@1", "0:8@0,1"], 2),  # grow, shrink
        (["0:4@0 | 4:8@1", "0:5@0 | 5:8@1", "0:2@1 | 2:8@0"], 2),  # migrate, permuted devices
        (["0:8@0", "0:2@0 | 2:4@1 | 4:8@2", "0:8@2"], 3),  # one device to all and to another
    ],
)
def test_grow_shrink_and_migrate_equal_one_process(
    workers: WorkerPool, plans: list[str], size: int, way: str
) -> None:
    expected = reference(workers, TIED, iterations=6)
    got = workers.run(size, jobs.train, TIED, plans, 6, way=way)
    jobs.assert_same(jobs.merge(got), expected)


def test_random_sequences_of_plans_and_policies_equal_one_process(
    workers: WorkerPool, count: Callable[[int, int], int]
) -> None:
    # Dropout is on in all models.
    for seed in range(count(6, 200)):
        config = (TIED, UNTIED, BERT)[seed % 3]
        devices = 2 + seed % (3 if seed < 6 else 5)
        policies, rng = list(POLICIES), random.Random(seed)
        plans = [
            f"{plan} ; schedule {rng.choice(policies)}"
            for plan in random_plans(seed, config.layers.num_units, devices, 8)
        ]
        expected = reference(workers, config, iterations=8)
        way = WAYS[seed // 2 % 3]
        got = workers.run(devices, jobs.train, config, plans, 8, way=way)
        try:
            jobs.assert_same(jobs.merge(got), expected)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, plans {plans}, {way}: {error}") from error


@pytest.mark.parametrize("config", [BERT, replace(BERT, binary_head=False, num_tokentypes=0)])
def test_bert_with_and_without_the_sentence_order_head_equals_one_process(
    workers: WorkerPool, config: jobs.ModelConfig
) -> None:
    plans = ["0:6@0", "0:1@1,2 | 1:5@0 | 5:6@1", "0:3@2 | 3:6@0,1", "0:6@1"]
    expected = reference(workers, config, iterations=6)
    assert all(len(r.losses) == 1 + config.binary_head for r in expected[0])
    got = workers.run(3, jobs.train, config, plans, 6, way="mixed")
    jobs.assert_same(jobs.merge(got), expected)


@pytest.mark.parametrize("way", WAYS)
def test_evaluations_between_plans_change_nothing(workers: WorkerPool, way: str) -> None:
    expected = reference(workers, TIED, iterations=4, evaluate=True)
    evaluations = [r.losses for r in expected[0][1::2]]
    assert evaluations != [r.losses for r in expected[0][::2]], "dropout is off in them"
    assert expected[0][::2] == reference(workers, TIED, iterations=4)[0]
    plans = ["0:8@0", "0:2@0 | 2:4@1 | 4:8@2", "0:3@2,1 | 3:8@0", "0:8@2"]
    got = workers.run(3, jobs.train, TIED, plans, 4, way=way, evaluate=True)
    jobs.assert_same(jobs.merge(got), expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_update_still_switches(workers: WorkerPool, way: str) -> None:
    # All of the batch's targets are masked in iterations 1 and 2: no update, no NaN.
    masked = frozenset(range(8, 24))
    expected = reference(workers, TIED, iterations=5, masked=masked)
    assert [r.skipped for r in expected[0]] == [False, True, True, False, False]
    plans = ["0:8@0", "0:8@0", "0:2@0 | 2:4@1 | 4:8@2", "0:8@2,1", "0:4@1 | 4:8@0"]
    got = workers.run(3, jobs.train, TIED, plans, 5, way=way, masked=masked)
    jobs.assert_same(jobs.merge(got), expected)


@pytest.mark.parametrize("way", WAYS)
def test_replicas_without_work_hold_and_pass_on_what_they_were_given(
    workers: WorkerPool, way: str
) -> None:
    # One micro-batch goes to the first of each group: the others get slabs, compute nothing on
    # them, and pass them on or drop them, while the state may still be on its way.
    last = ["0:4@2 | 4:8@1", "0:8@2", "0:8@2,0", "0:8@2"]
    plans = ["0:8@0", "0:8@0,1,2", "0:8@2,0", "0:8@2,1", *last]
    expected = reference(workers, TIED, iterations=8, budget=1000)
    got = workers.run(3, jobs.train, TIED, plans, 8, way=way, budget=1000)
    jobs.assert_same(jobs.merge(got), expected)


def test_exact_sums_give_the_same_bits_under_any_plans(workers: WorkerPool) -> None:
    config = replace(TIED, num_layers=2)
    units = config.layers.num_units
    expected = reference(workers, config, iterations=12, exact=True)
    for devices in (2, 3, 4):
        plans = random_plans(devices, units, devices, 12)
        got = workers.run(devices, jobs.train, config, plans, 12, exact=True, way="mixed")
        jobs.assert_equal_bits(jobs.merge(got), expected)


@pytest.mark.parametrize("way", ["early", "late"])
def test_bfloat16_models_switch_to_the_same_bits(workers: WorkerPool, way: str) -> None:
    config = replace(TIED, num_layers=2, params_dtype="bfloat16")
    expected = reference(workers, config, iterations=8, exact=True)
    assert any(".master." in name for name in expected[1])
    plans = random_plans(1, config.layers.num_units, 3, 8)
    got = workers.run(3, jobs.train, config, plans, 8, exact=True, way=way)
    jobs.assert_equal_bits(jobs.merge(got), expected)
