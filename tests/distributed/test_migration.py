"""Live migration: part of an iteration runs on the next plan already, with the same result."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import TIED, UNTIED, reference
from tests.distributed.test_switching import WAYS, random_plans


@pytest.mark.parametrize("way", ["early", "mixed"])
def test_layers_that_move_within_an_iteration_change_nothing(workers: WorkerPool, way: str) -> None:
    plans = ["0:4@0 | 4:8@1", "0:6@0 | 6:8@1", "0:2@1 | 2:8@0,1", "0:8@1"]
    expected = reference(workers, TIED, iterations=6)
    got = workers.run(2, jobs.train, TIED, plans, 6, way=way, migrate=True)
    jobs.assert_same(jobs.merge(got), expected)


def test_random_plans_with_migration_equal_one_process(
    workers: WorkerPool, count: Callable[[int, int], int]
) -> None:
    for seed in range(count(4, 100)):
        config = (TIED, UNTIED)[seed % 2]
        devices = 2 + seed % 3
        plans = random_plans(1000 + seed, config.layers.num_units, devices, 8)
        expected = reference(workers, config, iterations=8)
        got = workers.run(devices, jobs.train, config, plans, 8, way=WAYS[seed % 3], migrate=True)
        try:
            jobs.assert_same(jobs.merge(got), expected)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, plans {plans}: {error}") from error


def test_migration_with_exact_sums_gives_the_same_bits(workers: WorkerPool) -> None:
    units = TIED.layers.num_units
    expected = jobs.merge(workers.run(1, jobs.train, TIED, f"0:{units}@0", 8, exact=True))
    plans = random_plans(77, units, 3, 8)
    got = workers.run(3, jobs.train, TIED, plans, 8, exact=True, migrate=True)
    jobs.assert_equal_bits(jobs.merge(got), expected)
