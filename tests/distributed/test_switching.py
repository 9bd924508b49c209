"""Any plan to any plan, between iterations: training equals one process that never switches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_flex.planner.plan import Plan, Stage
from tests.distributed import jobs
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


def test_random_sequences_of_plans_equal_one_process(
    workers: WorkerPool, count: Callable[[int, int], int]
) -> None:
    for seed in range(count(6, 200)):
        config = (TIED, UNTIED)[seed % 2]
        devices = 2 + seed % 3 if seed < 100 else 2 + seed % 5
        plans = random_plans(seed, config.layers.num_units, devices, 8)
        expected = reference(workers, config, iterations=8)
        got = workers.run(devices, jobs.train, config, plans, 8, way=WAYS[seed % 3])
        try:
            jobs.assert_same(jobs.merge(got), expected)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, plans {plans}: {error}") from error


def test_exact_sums_give_the_same_bits_under_any_plans(workers: WorkerPool) -> None:
    config = replace(TIED, num_layers=2)
    units = config.layers.num_units
    expected = jobs.merge(workers.run(1, jobs.train, config, f"0:{units}@0", 12, exact=True))
    for devices in (2, 3, 4):
        plans = random_plans(devices, units, devices, 12)
        results, state = jobs.merge(
            workers.run(devices, jobs.train, config, plans, 12, exact=True, way="mixed")
        )
        assert [(r.losses, r.grad_norm) for r in results] == [
            (r.losses, r.grad_norm) for r in expected[0]
        ], f"plans {plans}"
        different = [n for n, v in expected[1].items() if not v.equal(state[n])]
        assert not different, f"plans {plans}: other bits in {different}"
