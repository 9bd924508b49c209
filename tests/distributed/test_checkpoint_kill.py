"""Processes killed at random moments of a save, and resumed: nothing complete is ever lost."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_flex.checkpoint import layout
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.load import load, read_common, verify
from megatron_flex.checkpoint.retention import Retention
from megatron_flex.checkpoint.save import save
from tests.distributed.pool import WorkerPool
from tests.distributed.test_checkpoint import state_of

GAVE_UP = 3  # exit code of a rank that was told that the other is gone


def _save_for_ever(directory: str, rendezvous: str, rank: int, ready: str) -> None:
    """Resume, save the same iteration once more, then one iteration after the other."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    group = dist.group.WORLD
    assert group is not None
    iteration = layout.latest(directory) or 0
    if iteration:
        common = load(directory, state_of([rank], 0), iteration=iteration, group=group)
        assert common["iteration"] == iteration
    Path(ready).touch()
    try:
        while True:
            start = time.monotonic()
            state = state_of([rank, 2 + rank], iteration)
            keep = Retention(keep=2)
            save(directory, iteration, state, {"iteration": iteration}, group=group, retention=keep)
            iteration += 1
            Path(f"{ready}.seconds").write_text(f"{time.monotonic() - start:9.6f}")
    except CheckpointError as error:
        Path(f"{ready}.error").write_text(str(error))
        os._exit(GAVE_UP)


def _check(directory: Path) -> int:
    """All checkpoints that have a name are whole, and the newest holds what was saved."""
    iterations = layout.iterations_in(directory)
    for iteration in iterations:
        verify(directory, iteration)
        assert read_common(directory, iteration) == {"iteration": iteration}
    newest = layout.latest(directory)
    if newest is None:
        return 0
    assert newest in iterations
    assert newest >= iterations[-1] - 1, "the tracker may lack the last checkpoint at most"
    expected = state_of([0, 1, 2, 3], newest)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load(directory, tensors, group=None)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    return newest


def test_a_kill_at_any_moment_leaves_the_newest_complete_checkpoint(
    workers: WorkerPool, tmp_path: Path, count: Callable[[int, int], int]
) -> None:
    # The fixture has prepared the server that forks processes with torch imported.
    context = multiprocessing.get_context("forkserver")
    directory, chance = tmp_path / "save", random.Random(7)
    newest = interrupted = 0
    seconds = 0.0  # that one save takes here: kills are to fall into the first five
    for trial in range(count(5, 30)):
        victims = chance.choice([[0], [1], [0, 1]])
        names = [str(tmp_path / f"ready{trial}-{rank}") for rank in (0, 1)]
        processes: list[ForkServerProcess] = [
            context.Process(
                target=_save_for_ever,
                args=(str(directory), str(tmp_path / f"meet{trial}"), rank, names[rank]),
                daemon=True,
            )
            for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        try:
            deadline = time.monotonic() + 60
            signs = names if trial else [f"{name}.seconds" for name in names]
            while not all(map(os.path.exists, signs)):
                assert time.monotonic() < deadline, "the ranks did not start"
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 5 * seconds))
            for rank in victims:
                pid = processes[rank].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            for rank, process in enumerate(processes):
                process.join(20)
                killed = rank in victims
                assert process.exitcode == (-signal.SIGKILL if killed else GAVE_UP), trial
                if not killed:
                    assert re.search("lost (a )?rank", Path(f"{names[rank]}.error").read_text())
        finally:
            for process in processes:
                process.kill()
                process.join(10)
        for measured in tmp_path.glob(f"ready{trial}-*.seconds"):
            seconds = float(measured.read_text() or seconds)
        interrupted += any(directory.glob(".tmp-*"))
        before, newest = newest, _check(directory)
        assert newest >= before, "an earlier checkpoint was lost"
    assert layout.latest(directory) is not None
    assert interrupted > 0, "no kill fell into a save"
