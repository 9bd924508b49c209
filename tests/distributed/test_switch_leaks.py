"""A thousand switches end with the memory, threads, descriptors and groups of the first ten."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations

import pytest
import torch
import torch.distributed as dist

from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.groups import ReductionGroups
from megatron_flex.runtime.world import World
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import TIED
from tests.distributed.test_switching import random_plan

CYCLE = 10
"""Switches after which the sequence of plans begins again."""


@dataclass(frozen=True)
class Usage:
    """What a worker uses. ``resident`` are bytes of its memory, ``objects`` those of Python."""

    threads: int
    descriptors: int
    groups: int
    pooled: int
    objects: int
    resident: int


def usage(reductions: ReductionGroups, executor: Executor | None = None) -> Usage:
    """Measured when all groups that were asked for are made, and the others destroyed."""
    reductions._maker.submit(int).result(30)
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    pool = None if executor is None else executor.holdings.pool
    return Usage(
        threads=len(os.listdir("/proc/self/task")),
        descriptors=len(os.listdir("/proc/self/fd")),
        groups=reductions.size,
        pooled=0 if pool is None else pool.used + pool.kept,
        objects=len(gc.get_objects()),
        resident=pages * os.sysconf("SC_PAGE_SIZE"),
    )


def switch_often(plans: Sequence[str], switches: int, capacity: int) -> list[Usage]:
    """Usage after every cycle of plans."""
    taken = []

    def each(iteration: int, executor: Executor) -> None:
        if (iteration + 1) % CYCLE == 0:
            assert executor.world.reductions is not None
            taken.append(usage(executor.world.reductions, executor))

    repeated = [plans[i % CYCLE] for i in range(switches + 1)]
    jobs.train(TIED, repeated, switches, way="mixed", capacity=capacity, each=each, longest=20)
    return taken


def test_many_switches_use_what_the_first_ten_did(
    workers: WorkerPool, count: Callable[[int, int], int]
) -> None:
    rng = random.Random(5)
    plans: list[str] = []
    while len(plans) < CYCLE:
        plan = str(random_plan(rng, TIED.layers.num_units, 3))
        if not plans or plan != plans[-1]:
            plans.append(plan)
    switches = count(60, 1000)
    # Room for two groups: most switches destroy some and make others.
    taken = workers.run(3, switch_often, plans, switches, 2, timeout=30.0 + 3 * switches)
    for usages in taken:
        first, last = usages[0], usages[-1]
        assert last.threads <= first.threads
        assert last.descriptors <= first.descriptors
        assert last.groups <= first.groups
        assert last.pooled <= first.pooled
        # The job itself keeps the result of every iteration.
        assert last.objects - first.objects <= 10 * switches
        assert last.resident - first.resident <= 12 << 20


# -- process groups alone ----------------------------------------------------------------------


def sum_over(
    reductions: ReductionGroups, rank: int, groups: Sequence[tuple[int, ...]], number: int
) -> None:
    """Sums over all groups at once, checked. (Their works keep descriptors until they are gone.)"""
    running = []
    for place, ranks in enumerate(groups):
        if rank in ranks:
            tensor = torch.full((300,), float(rank + place))
            expected = float(sum(ranks) + place * len(ranks))
            running.append((reductions.all_reduce(tensor, ranks), tensor, expected, ranks))
    for work, tensor, expected, ranks in running:
        work.wait()
        assert (tensor == expected).all(), f"round {number}, group {ranks}"


def churn(seed: int, rounds: int, capacity: int) -> tuple[Usage, Usage, Usage, int]:
    """Sum over random sets of workers, with room for few groups.

    Returns the usage before, after ten rounds, and at the end without groups, and the most groups.
    """
    world = World.create(torch.device("cpu"), timedelta(seconds=60))
    assert world.reductions is not None
    world.reductions.close()
    store = dist.distributed_c10d._get_default_store()
    reductions = ReductionGroups(world.rank, store, "gloo", timedelta(seconds=60), capacity)
    before = early = usage(reductions)
    rng, own = random.Random(seed), random.Random(world.rank)
    devices = range(world.size)
    subsets = [c for n in range(2, world.size + 1) for c in combinations(devices, n)]
    most = 0
    for number in range(rounds):
        wanted = rng.sample(subsets, rng.randint(1, 4))
        reductions.prepare(wanted)
        most = max(most, reductions.size)
        if number == 10:
            early = usage(reductions)
        if own.random() < 0.3:
            time.sleep(own.uniform(0.0, 0.02))
        # A group may be asked for and not used: a slab without parameters.
        sum_over(reductions, world.rank, [ranks for ranks in wanted if rng.random() < 0.8], number)
        world.barrier()  # the global norm
    reductions.capacity = 0
    for _ in range(3):
        world.barrier()
        reductions.prepare([])
    assert reductions.size == 0
    after = usage(reductions)
    reductions.close()
    return before, early, after, most


@pytest.mark.parametrize(("size", "capacity"), [(4, 3), (6, 5)])
def test_groups_come_and_go_while_others_are_in_use(
    workers: WorkerPool, count: Callable[[int, int], int], size: int, capacity: int
) -> None:
    rounds = count(40, 1000)
    taken = workers.run(size, churn, 1, rounds, capacity, timeout=30.0 + rounds)
    for before, early, after, most in taken:
        assert capacity <= most <= max(capacity, 8)  # four an iteration, and the one before
        assert after.threads <= before.threads
        assert after.descriptors <= before.descriptors
        assert after.resident - early.resident <= 8 << 20
