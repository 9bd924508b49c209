"""Hand-overs through host memory: training is the same as with messages, whatever happens to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_flex.loop.host_copies import HostCopies
from megatron_flex.model.config import ModelConfig
from megatron_flex.runtime.executor import Executor
from megatron_flex.twinlayer.client import status_of
from tests.distributed import jobs
from tests.distributed.host_memory import HostMemory
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import TIED, UNTIED
from tests.distributed.test_switching import random_plans
from tests.end_to_end import runs

ROOM = 32 << 20
GROW_SHRINK = ["0:8@0,1", "0:4@0 | 4:8@1", "0:8@0,1", "0:2@1 | 2:8@0"]


def train(
    config: ModelConfig,
    plans: Sequence[str],
    iterations: int,
    *,
    room: int = ROOM,
    servers: Sequence[int] | None = None,
    kill_manager_after: int | None = None,
    **more: Any,
) -> tuple[jobs.Outcome, dict[str, Any]]:
    """``jobs.train`` through host memory; beside it what the manager says at the end."""
    with HostMemory(room, servers) as memory:

        def each(iteration: int, executor: Executor) -> None:
            if iteration == kill_manager_after:
                status = memory.status()
                if executor.world.rank == 0:
                    os.kill(status["pid"], signal.SIGKILL)
                executor.world.barrier()

        outcome = jobs.train(config, plans, iterations, arena=memory.connect, each=each, **more)
        return outcome, memory.status()


def both(
    workers: WorkerPool,
    size: int,
    config: ModelConfig,
    plans: Sequence[str],
    iterations: int,
    **more: Any,
) -> list[dict[str, Any]]:
    """Train with messages and through memory, assert the same bits; what each manager says."""
    common = {k: more.pop(k) for k in ("way", "exact") if k in more}
    expected = jobs.merge(workers.run(size, jobs.train, config, plans, iterations, **common))
    got = workers.run(size, train, config, plans, iterations, **common, **more)
    results, state = jobs.merge([outcome for outcome, _ in got])
    assert results == expected[0], f"plans {plans}"
    different = [n for n, v in expected[1].items() if not v.equal(state[n])]
    assert not different, f"plans {plans}: other bits in {different}"
    return [status for _, status in got]


@pytest.mark.parametrize("way", ["late", "mixed"])
def test_training_has_the_same_bits_as_with_messages(workers: WorkerPool, way: str) -> None:
    status = both(workers, 2, TIED, GROW_SHRINK, 5, way=way)[0]
    assert status["handed_over"] > 0
    assert status["without_room"] == 0
    assert status["room_used"] < status["room_bytes"]


def test_random_sequences_of_plans_have_the_same_bits(
    workers: WorkerPool, count: Callable[[int, int], int]
) -> None:
    for seed in range(count(1, 100)):
        config = replace((TIED, UNTIED)[seed % 2], params_dtype=("float32", "bfloat16")[seed % 2])
        devices = 3 + seed % 2
        plans = random_plans(1000 + seed, config.layers.num_units, devices, 8)
        status = both(workers, devices, config, plans, 8, way=("late", "mixed")[seed % 2])[0]
        assert status["handed_over"] > 0, f"plans {plans}"


def test_what_finds_no_room_goes_by_message(workers: WorkerPool) -> None:
    slab = 3 * 4 * 4 * 32 * 32  # bytes, about: the attention half of a layer
    status = both(workers, 2, TIED, GROW_SHRINK, 5, way="late", room=2 * slab)[0]
    assert status["without_room"] > 0
    assert status["handed_over"] > 0


def test_workers_of_different_servers_use_messages_and_those_of_one_its_memory(
    workers: WorkerPool,
) -> None:
    plans = ["0:8@0", "0:2@1 | 2:5@2 | 5:8@3", "0:8@2", "0:4@3 | 4:8@0,1", "0:8@1"]
    servers = (0, 0, 2, 2)
    statuses = both(workers, 4, TIED, plans, 6, way="late", servers=servers)
    assert statuses[0]["pid"] != statuses[2]["pid"]
    assert statuses[0]["handed_over"] > 0
    assert statuses[2]["handed_over"] > 0


def test_a_killed_manager_changes_nothing_but_the_way(workers: WorkerPool) -> None:
    plans = [*GROW_SHRINK, *GROW_SHRINK]
    statuses = both(workers, 2, TIED, plans, 8, way="late", kill_manager_after=2)
    assert statuses == [{}, {}]


def trained(argv: Sequence[str]) -> tuple[runs.Run, dict[str, Any] | None]:
    """A run through the training loop; beside it what its manager says at the end."""
    statuses: list[dict[str, Any] | None] = []
    close = HostCopies.close

    def closing(self: HostCopies) -> None:
        self._world.barrier()
        statuses.append(None if self._layers is None else status_of(self._socket))
        close(self)

    HostCopies.close = closing  # type: ignore[method-assign]
    try:
        return runs.train(argv), statuses[0]
    finally:
        HostCopies.close = close  # type: ignore[method-assign]


def test_the_training_loop_hands_over_through_memory_unless_it_is_told_not_to(
    workers: WorkerPool, tmp_path: Path
) -> None:
    script = tmp_path / "plans.txt"
    script.write_text("\n".join(GROW_SHRINK))
    prefix = runs.write_documents(tmp_path / "text")
    data = ["--data-path", prefix, "--split", "1,0,0", "--train-iters", "5"]
    flags = [*runs.MODEL, *runs.TRAINING, *data, "--flexpipe-plans", str(script)]
    ways = {
        "memory": ["--flexpipe-switch", "handover"],
        "messages": ["--flexpipe-switch", "handover", "--flexpipe-no-twin"],
        "stall": ["--flexpipe-switch", "stall"],
    }
    found = {way: workers.run(2, trained, [*flags, *more])[0] for way, more in ways.items()}
    status = found["memory"][1]
    assert status is not None
    assert status["handed_over"] > 0
    assert status["without_room"] == 0
    assert found["messages"][1] is None
    assert found["stall"][1] is None
    for other in ("messages", "stall"):
        assert found[other][0].losses == found["memory"][0].losses
        assert found[other][0].norms == found["memory"][0].norms
