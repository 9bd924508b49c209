"""Memory optimisation changes what a worker keeps, never what it computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron_flex.model.config import ModelConfig
from megatron_flex.runtime.communicator import Communicator
from megatron_flex.runtime.memory import MemoryMeter
from megatron_flex.runtime.world import World
from megatron_flex.schedule.instructions import RecvActivation, SendActivation
from megatron_flex.schedule.list_scheduler import POLICIES
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import TIED, UNTIED
from tests.distributed.test_switching import WAYS, random_plan

DROPPING = replace(TIED, hidden_dropout=0.1, attention_dropout=0.1)
ITERATIONS = 3


def run(
    workers: WorkerPool, config: ModelConfig, plan: str, size: int, **options: Any
) -> jobs.Merged:
    return jobs.merge(workers.run(size, jobs.train, config, plan, ITERATIONS, **options))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("config", "plan", "size"),
    [
        (DROPPING, "0:4@0 | 4:8@1", 2),
        (UNTIED, "0:2@0 | 2:5@1 | 5:8@0", 2),
        (jobs.BERT, "0:6@0", 1),
    ],
)
def test_recompute_gives_the_same_bits(
    workers: WorkerPool, config: ModelConfig, plan: str, size: int, exact: bool
) -> None:
    expected = run(workers, config, plan, size, exact=exact)
    last = config.layers.num_units - 1
    # A head that is recomputed adds to a tied embedding by itself: another order of sums.
    for units in ("1-3", f"0-{last}" if exact else f"1-{last - 1}"):
        got = run(workers, config, f"{plan} ; recompute {units}", size, exact=exact)
        jobs.assert_equal_bits(got, expected)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("config", "plan", "size"),
    [(UNTIED, "0:4@0 | 4:8@1", 2), (DROPPING, "0:8@0", 1)],
)
def test_optimizer_state_on_the_host_gives_the_same_bits(
    workers: WorkerPool, config: ModelConfig, plan: str, size: int, exact: bool
) -> None:
    expected = run(workers, config, plan, size, exact=exact)
    for units in ("2,3", f"0-{config.layers.num_units - 1}"):
        got = run(workers, config, f"{plan} ; optimizer {units}", size, exact=exact)
        jobs.assert_equal_bits(got, expected)


def test_a_joiner_waits_for_the_state_that_it_keeps_on_the_host(workers: WorkerPool) -> None:
    # It computes nothing in the iteration in which the state comes, and is at its end at once.
    plans = [f"0:8@{i % 2} ; optimizer 0-7" for i in range(8)]
    expected = jobs.merge(workers.run(1, jobs.train, UNTIED, "0:8@0", 8, exact=True))
    got = jobs.merge(workers.run(2, jobs.train, UNTIED, plans, 8, exact=True))
    jobs.assert_equal_bits(got, expected)


@pytest.mark.parametrize("way", ["early", "late", "mixed"])
def test_memory_optimisation_changes_from_iteration_to_iteration(
    workers: WorkerPool, way: str
) -> None:
    layouts = ["0:4@0 | 4:8@1", "0:8@0,1", "0:3@1 | 3:8@0", "0:8@1"]
    o_plans = ["", " ; recompute 1-3 ; optimizer 2-5", " ; optimizer 0-7", " ; recompute 4,6"]
    plans = [layouts[i // 2 % 4] + o_plans[i % 4] for i in range(8)]
    options: dict[str, Any] = {"exact": True, "evaluate": True}
    expected = jobs.merge(workers.run(1, jobs.train, TIED, "0:8@0", 8, **options))
    got = jobs.merge(workers.run(2, jobs.train, TIED, plans, 8, way=way, **options))
    jobs.assert_equal_bits(got, expected)


def test_state_that_joins_early_into_host_memory_is_waited_for(workers: WorkerPool) -> None:
    plans = [f"0:8@{i % 3},{(i + 1) % 3} ; optimizer 0-7" for i in range(12)]
    expected = jobs.merge(workers.run(1, jobs.train, TIED, "0:8@0", 12, exact=True, longest=25))
    got = jobs.merge(workers.run(3, jobs.train, TIED, plans, 12, exact=True, longest=25))
    jobs.assert_equal_bits(got, expected)


@pytest.mark.parametrize(
    ("config", "plan", "size", "policy"),
    [
        (DROPPING, "0:4@0 | 4:8@1", 2, "gpipe"),
        (UNTIED, "0:2@0 | 2:5@1 | 5:8@2", 3, "1f1b"),
        (jobs.BERT, "0:6@0", 1, "gpipe"),
    ],
)
def test_activations_on_the_host_give_the_same_bits(
    workers: WorkerPool, config: ModelConfig, plan: str, size: int, policy: str
) -> None:
    expected = run(workers, config, plan, size, policy=policy, longest=120)
    last = config.layers.num_units - 1
    for optimisation in (f"activations 0-{last}", "recompute 1,3 ; activations 2,4"):
        got = run(workers, config, f"{plan} ; {optimisation}", size, policy=policy, longest=120)
        jobs.assert_equal_bits(got, expected)


def random_optimisation(rng: random.Random, units: int) -> str:
    """Any O_plan, in text form; about a third of them are empty."""
    if rng.random() < 0.3:
        return ""
    chosen = {u: rng.choice(["recompute", "activations", ""]) for u in range(1, units)}
    listed = {
        n: [u for u, name in chosen.items() if name == n] for n in ("recompute", "activations")
    }
    states = {u: rng.choice(["optimizer", "optimizer", "shard", "shard", ""]) for u in range(units)}
    for name in ("optimizer", "shard"):
        listed[name] = [u for u, where in states.items() if where == name]
    return "".join(f" ; {name} {','.join(map(str, us))}" for name, us in listed.items() if us)


def test_peaks_of_random_iterations_are_predicted(
    workers: WorkerPool, count: Callable[[int, int], int]
) -> None:
    size = {"hidden_size": 128, "ffn_hidden_size": 512, "kv_channels": 32}
    words = {"vocab_size": 500, "padded_vocab_size": 512}
    configs = [replace(c, **size, **words) for c in (DROPPING, UNTIED, jobs.BERT)]  # type: ignore[arg-type]
    errors = []
    for seed in range(count(6, 60)):
        rng = random.Random(seed)
        config, devices = configs[seed % 3], 1 + seed % 4
        units = config.layers.num_units
        plans = [
            f"{random_plan(rng, units, devices)}{random_optimisation(rng, units)}" for _ in range(4)
        ]
        policy = list(POLICIES)[3 * seed % len(POLICIES)]
        outcomes = workers.run(
            devices, jobs.train, config, plans, 4, longest=120, budget=300, way=WAYS[seed % 3],
            exact=seed % 2 == 1, policy=policy,
        )  # fmt: skip
        rows = [row for result in outcomes[0].results for row in result.measured]
        # A device that holds nothing uses nothing but a few numbers.
        errors += [row.memory / row.predicted - 1.0 for row in rows if row.predicted > 0.0]
    near = sum(abs(e) <= 0.05 for e in errors)
    assert near >= 0.95 * len(errors), sorted(errors, key=abs)[near:]


def delivered() -> list[int]:
    """Messages that the sender still has: after five sends, with one under way, and with none."""
    world = World.create(torch.device("cpu"), timedelta(seconds=20))
    communicator = Communicator(world, 256, torch.float32)
    sends = [SendActivation(m, 0, 1, 500) for m in range(5)]
    receives = [RecvActivation(m, 0, 0, 500) for m in range(5)]
    found: list[int] = []
    communicator.expect(receives if world.rank else [])
    if world.rank == 0:
        meter, size = MemoryMeter(world.device), 500 * 256 * 4
        before = meter.current
        for send in sends:
            communicator.send(send, torch.zeros(500, 1, 256))
        found.append((meter.current - before) // size)
        communicator.delivered(under_way=1)  # the peer takes four at once, and waits here
        found.append((meter.current - before) // size)
        world.barrier()
        communicator.delivered()
        found.append((meter.current - before) // size)
    else:
        world.barrier()
        for receive in receives:
            communicator.receive(receive)
    communicator.finish()
    world.barrier()
    return found


def test_a_sent_buffer_goes_when_the_program_says_that_it_is_taken(workers: WorkerPool) -> None:
    assert workers.run(2, delivered)[0] == [5, 1, 0]
