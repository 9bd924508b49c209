"""Asynchronous saving: what is named is complete, and belongs to one iteration."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
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


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.001)


def _train_and_save(directory: Path, group: dist.ProcessGroup) -> None:
    """Saves at each iteration, changing the tensors as soon as it may.

    The disk is held: a checkpoint's files are not synchronised before its gate opens, which is
    when the next checkpoint begins to wait for it and the observer has seen the one before.
    """
    rank, fsync = dist.get_rank(), os.fsync
    gates: dict[str, threading.Event] = defaultdict(threading.Event)

    def held(fd: Any) -> None:
        assert gates[threading.current_thread().name].wait(60), "the disk was held for too long"
        fsync(fd)

    os.fsync = held
    try:
        saver = AsyncSaver(directory / "save", group=group, retention=Retention(keep=4))
        wait = saver.wait

        def wait_for_the_one_before() -> Path | None:
            _until(lambda: iteration <= 2 or (directory / f"seen{iteration - 2}").exists())
            gates[f"checkpoint-{iteration - 1}"].set()
            return wait()

        saver.wait = wait_for_the_one_before  # type: ignore[method-assign]
        mine = [slab for slab in range(4) if slab % 2 == rank]
        tensors = state_of(mine, 0)
        common: dict[str, Any] = {"position": [0]}
        for iteration in range(1, ITERATIONS + 1):
            for name, tensor in tensors.items():
                tensor.copy_(value_of(name, iteration))
            common["position"][0] = iteration
            saver.start(iteration, tensors, common)
            assert saver.running, "the write was waited for"
            named = layout.latest(directory / "save")
            assert named == (iteration - 1 or None), "the write before was not waited for"
            for tensor in tensors.values():  # the next update comes at once
                tensor.fill_(float("nan"))
            common["position"][0] = -1
        iteration += 1
        saver.close()
        assert not saver.running
        assert not saver.failed
    finally:
        os.fsync = fsync


def _observe(directory: Path) -> list[int]:
    """Check whatever the tracker names, again and again, and tell what was seen."""
    seen: list[int] = []
    while seen[-1:] != [ITERATIONS]:
        iteration = layout.latest(directory / "save")
        if iteration is not None and iteration not in seen[-1:]:
            verify(directory / "save", iteration)
            names = [name for slab in range(4) for name in names_of(slab)]
            tensors = {name: torch.zeros(11, 13) for name in names}
            common = load(directory / "save", tensors, iteration=iteration, group=None)
            assert common == {"position": [iteration]}
            for name, tensor in tensors.items():
                assert torch.equal(tensor, value_of(name, iteration)), (name, iteration)
            seen.append(iteration)
            (directory / f"seen{iteration}").touch()
        time.sleep(0.001)
    return seen


def _job(directory: str) -> list[int]:
    group = new_group(ranks=[0, 1])
    if dist.get_rank() == 2:
        return _observe(Path(directory))
    _train_and_save(Path(directory), group)
    return []


def test_a_slow_disk_and_a_short_interval_name_complete_checkpoints_only(
    workers: WorkerPool, tmp_path: Path
) -> None:
    _, _, seen = workers.run(3, _job, str(tmp_path))
    assert seen == list(range(1, ITERATIONS + 1))
    assert layout.iterations_in(tmp_path / "save") == [5, 6, 7, 8]
