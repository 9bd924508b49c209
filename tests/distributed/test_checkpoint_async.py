"""Asynchronous saving: what is named is complete, and belongs to one iteration."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flex.checkpoint import layout
from megatron_flex.checkpoint.async_save import AsyncSaver
from megatron_flex.checkpoint.load import load, verify
from megatron_flex.checkpoint.retention import Retention
from tests.distributed.pool import WorkerPool
from tests.distributed.test_checkpoint import names_of, new_group, state_of, value_of

ITERATIONS = 8
DELAY = 0.05  # seconds that the slow disk takes for each synchronisation


def _train_and_save(directory: str, group: dist.ProcessGroup) -> list[float]:
    """Saves at each iteration, changing the tensors as soon as it may; seconds of each wait."""
    rank, fsync = dist.get_rank(), os.fsync

    def slowly(fd: Any) -> None:
        time.sleep(DELAY)
        fsync(fd)

    os.fsync = slowly
    try:
        saver = AsyncSaver(directory, group=group, retention=Retention(keep=4))
        mine = [slab for slab in range(4) if slab % 2 == rank]
        tensors = state_of(mine, 0)
        common: dict[str, Any] = {"position": [0]}
        waits = []
        for iteration in range(1, ITERATIONS + 1):
            for name, tensor in tensors.items():
                tensor.copy_(value_of(name, iteration))
            common["position"][0] = iteration
            start = time.monotonic()
            waited = saver.start(iteration, tensors, common)
            waits.append(waited)
            assert time.monotonic() - start - waited < 5 * DELAY, "the write was waited for"
            for tensor in tensors.values():  # the next update comes at once
                tensor.fill_(float("nan"))
            common["position"][0] = -1
        saver.close()
        assert not saver.running
        assert not saver.failed
        return waits
    finally:
        os.fsync = fsync


def _observe(directory: Path, done: Path) -> list[int]:
    """Check whatever the tracker names, again and again."""
    seen: list[int] = []
    while True:
        last_look = done.exists()
        iteration = layout.latest(directory)
        if iteration is not None and iteration not in seen[-1:]:
            verify(directory, iteration)
            names = [name for slab in range(4) for name in names_of(slab)]
            tensors = {name: torch.zeros(11, 13) for name in names}
            common = load(directory, tensors, iteration=iteration, group=None)
            assert common == {"position": [iteration]}
            for name, tensor in tensors.items():
                assert torch.equal(tensor, value_of(name, iteration)), (name, iteration)
            seen.append(iteration)
        if last_look:
            return seen
        time.sleep(0.001)


def _job(directory: str) -> list[Any]:
    group = new_group(ranks=[0, 1])
    done = Path(directory) / "done"
    if dist.get_rank() == 2:
        return _observe(Path(directory) / "save", done)
    waits = _train_and_save(str(Path(directory) / "save"), group)
    if dist.get_rank() == 0:
        done.touch()
    return waits


def test_a_slow_disk_and_a_short_interval_name_complete_checkpoints_only(
    workers: WorkerPool, tmp_path: Path
) -> None:
    waits, _, seen = workers.run(3, _job, str(tmp_path))
    assert waits[0] < DELAY
    assert sum(waits[1:]) > DELAY, "the disk was not slow enough to be waited for"
    assert seen == sorted(set(seen))
    assert seen[-1] == ITERATIONS
    assert len(seen) >= ITERATIONS // 2, "the observer was too slow to see the checkpoints"
    assert layout.iterations_in(tmp_path / "save") == [5, 6, 7, 8]
