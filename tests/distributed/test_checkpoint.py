"""Checkpoints of several ranks: any layout, errors of one rank on all, waits that end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron_flex.checkpoint import layout
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.load import load
from megatron_flex.checkpoint.ranks import Ranks
from megatron_flex.checkpoint.save import check_writable, save
from tests.distributed.pool import WorkerPool
from tests.unit.disk import file_size_limit

SLABS = 7
MODEL = {"hidden_size": 4}


def value_of(name: str, iteration: int) -> torch.Tensor:
    """The values that tensor ``name`` has at ``iteration``, wherever it lives."""
    seed = sum(ord(c) * (i + 1) for i, c in enumerate(name)) * 1000 + iteration
    return torch.randn(11, 13, generator=torch.Generator().manual_seed(seed))


def names_of(slab: int) -> list[str]:
    """Two tensors a slab: a weight and one of its moments."""
    return [f"decoder.{slab}.weight", f"optimizer.state.exp_avg.decoder.{slab}.weight"]


def state_of(slabs: list[int], iteration: int) -> dict[str, torch.Tensor]:
    """All tensors of ``slabs`` at ``iteration``."""
    return {name: value_of(name, iteration) for slab in slabs for name in names_of(slab)}


def new_group(seconds: float = 60.0, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """A group as the trainer makes it for checkpoints."""
    group = dist.new_group(ranks, timeout=timedelta(seconds=seconds), backend="gloo")
    return cast(dist.ProcessGroup, group)


def _save(directory: str, owners: list[int], iteration: int) -> str:
    rank = dist.get_rank()
    mine = [slab for slab, owner in enumerate(owners) if owner == rank]
    common = {"iteration": iteration, "model": MODEL}
    return str(save(directory, iteration, state_of(mine, iteration), common, group=new_group()))


def _load(directory: str, holders: list[list[int]], iteration: int) -> int:
    """Each rank loads the slabs that it holds, several ranks the same; counts equal tensors."""
    mine = [slab for slab, ranks in enumerate(holders) if dist.get_rank() in ranks]
    wanted = state_of(mine, iteration)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    common = load(directory, tensors, group=new_group(), model=MODEL)
    assert common["iteration"] == iteration
    return sum(torch.equal(tensors[name], wanted[name]) for name in wanted)


def _outcome(action: Callable[[], object]) -> tuple[str, float]:
    """What ``action`` says when it fails, and after how many seconds."""
    start = time.monotonic()
    try:
        action()
    except CheckpointError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def test_three_ranks_on_an_uneven_plan_save_and_any_number_load(
    workers: WorkerPool, tmp_path: Path
) -> None:
    paths = workers.run(3, _save, str(tmp_path), [0, 0, 0, 1, 2, 2, 0], 12)
    assert paths == [str(tmp_path / "iter_0000012")] * 3
    for world in (1, 2, 4, 5):
        # Each slab on two ranks (its replicas), the last rank perhaps idle.
        holders = [sorted({slab % world, (slab + 1) % world}) for slab in range(SLABS)]
        counts = workers.run(world, _load, str(tmp_path), holders, 12)
        assert counts == [2 * sum(r in h for h in holders) for r in range(world)]


def test_ranks_that_own_nothing_take_part(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(4, _save, str(tmp_path), [1] * SLABS, 1)
    counts = workers.run(3, _load, str(tmp_path), [[2]] * SLABS, 1)
    assert counts == [0, 0, 2 * SLABS]


def _save_in_subgroup(directory: str) -> str:
    group = new_group(ranks=[1, 2])
    if dist.get_rank() == 0:
        return ""
    owned = state_of([dist.get_rank()], 5)
    path = save(directory, 5, owned, {"iteration": 5, "model": MODEL}, group=group)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state_of([1, 2], 5).items()}
    load(directory, tensors, group=group)
    assert all(torch.equal(tensors[n], t) for n, t in state_of([1, 2], 5).items())
    return str(path)


def test_only_the_group_that_was_passed_takes_part(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "iter_0000005")
    assert workers.run(3, _save_in_subgroup, str(tmp_path)) == ["", path, path]


def _fail_to_write(directory: str, culprit: int) -> tuple[str, float]:
    group, rank = new_group(), dist.get_rank()
    save(directory, 1, state_of([rank], 1), {"iteration": 1, "model": MODEL}, group=group)
    with file_size_limit(500 if rank == culprit else -1):
        return _outcome(lambda: save(directory, 2, state_of([rank], 2), {}, group=group))


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_full_disk_on_one_rank_is_an_error_on_all_at_once(
    workers: WorkerPool, tmp_path: Path, culprit: int
) -> None:
    outcomes = workers.run(3, _fail_to_write, str(tmp_path), culprit)
    for message, seconds in outcomes:
        assert f"rank {culprit}: {tmp_path}" in message
        assert "limit is reached" in message
        assert seconds < 30  # and not the group's time-out
    assert sorted(os.listdir(tmp_path)) == [".checkpoint.lock", "iter_0000001", layout.TRACKER]
    assert workers.run(2, _load, str(tmp_path), [[0, 1]] * 3, 1) == [6, 6]


def _disagree(directory: str) -> list[str]:
    group, rank = new_group(), dist.get_rank()
    same = {"iteration": 1}
    return [
        _outcome(lambda: save(directory, 1, {}, {"iteration": rank}, group=group))[0],
        _outcome(lambda: save(directory, 1, state_of([rank // 2], 1), same, group=group))[0],
        _outcome(lambda: save(directory, 1, {}, {"x": {0, 1} if rank else 0}, group=group))[0],
    ]


def test_ranks_that_disagree_are_told_and_nothing_is_written(
    workers: WorkerPool, tmp_path: Path
) -> None:
    outcomes = workers.run(3, _disagree, str(tmp_path / "new"))
    assert outcomes[1:] == outcomes[:1] * 2
    different, doubled, not_json = outcomes[0]
    assert "ranks 0 and 1 have different common states" in different
    assert "decoder.0.weight is given by ranks 0 and 1; one must own it" in doubled
    assert "rank 1: common['x'] is a set" in not_json
    assert not (tmp_path / "new").exists()


def _damaged(directory: str) -> str:
    tensors = {name: torch.zeros(11, 13) for name in names_of(0)}
    message, seconds = _outcome(lambda: load(directory, tensors, group=new_group()))
    assert seconds < 30
    assert not any(tensor.any() for tensor in tensors.values())
    return message


def test_a_damaged_file_is_an_error_on_all_ranks(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(2, _save, str(tmp_path), [slab % 2 for slab in range(SLABS)], 1)
    path = tmp_path / "iter_0000001" / "__1_0.distcp"
    os.truncate(path, path.stat().st_size - 7)
    messages = workers.run(3, _damaged, str(tmp_path))
    assert set(messages) == {messages[0]}
    assert f"{path} is truncated" in messages[0]


def _missing(directory: str) -> str:
    wanted = {"absent": torch.zeros(1)} if dist.get_rank() == 1 else {}
    return _outcome(lambda: load(directory, wanted, group=new_group()))[0]


def test_a_tensor_missing_for_one_rank_is_an_error_on_all(
    workers: WorkerPool, tmp_path: Path
) -> None:
    workers.run(2, _save, str(tmp_path), [0] * SLABS, 1)
    messages = workers.run(2, _missing, str(tmp_path))
    assert all("rank 1: the checkpoint has no absent" in message for message in messages)


def _elsewhere(directories: list[str]) -> list[str]:
    group, rank = new_group(), dist.get_rank()
    os.chdir(directories[rank])
    return [
        _outcome(lambda: save("save", 1, {}, {}, group=group))[0],
        _outcome(lambda: check_writable("save", group=group))[0],
    ]


def test_a_directory_that_nodes_do_not_share_is_refused(
    workers: WorkerPool, tmp_path: Path
) -> None:
    directories = [tmp_path / "node0", tmp_path / "node1"]
    for directory in directories:
        directory.mkdir()
    for messages in workers.run(2, _elsewhere, list(map(str, directories))):
        assert all("rank 1: save is not the same directory" in message for message in messages)
    assert [p.name for p in (directories[0] / "save").iterdir()] == [".checkpoint.lock"]


def _slow_disk(directory: str, delay: float, group_timeout: float, timeout: float) -> str:
    group, rank = new_group(group_timeout), dist.get_rank()
    fsync = os.fsync
    if rank == 1:  # as if this rank's disk took its time to synchronise

        def slowly(fd: Any) -> None:
            time.sleep(delay)
            fsync(fd)

        os.fsync = slowly
    try:
        state = state_of([rank], 1)
        return _outcome(lambda: save(directory, 1, state, {}, group=group, timeout=timeout))[0]
    finally:
        os.fsync = fsync


def test_a_disk_slower_than_the_groups_time_out_is_waited_for(
    workers: WorkerPool, tmp_path: Path
) -> None:
    assert workers.run(3, _slow_disk, str(tmp_path), 2.0, 1.0, 60.0) == [""] * 3
    assert layout.latest(tmp_path) == 1


def test_a_rank_that_is_waited_for_in_vain_is_named(workers: WorkerPool, tmp_path: Path) -> None:
    messages = workers.run(3, _slow_disk, str(tmp_path), 4.0, 60.0, 1.0)
    step = "while writing the checkpoint of iteration 1"
    assert messages[0].startswith(f"{step}: rank 1 did not answer within 1 s")
    assert messages[2].startswith(f"{step}: ")
    assert layout.latest(tmp_path) is None


def _gather(failing: list[int]) -> tuple[list[int] | None, str]:
    ranks = Ranks(new_group(), timeout=20)
    results: list[int] | None = None

    def work() -> int:
        if ranks.rank in failing:
            raise ValueError(f"bad {ranks.rank}")
        return ranks.rank**2

    def gather() -> None:
        nonlocal results
        results = ranks.gather("testing", work)

    message, _ = _outcome(gather)
    if failing:  # the exchange works on after an error
        assert ranks.from_first("going on", lambda: "first") == "first"
    return results, message


def test_results_reach_the_first_rank_and_errors_reach_all(workers: WorkerPool) -> None:
    assert workers.run(3, _gather, []) == [([0, 1, 4], ""), (None, ""), (None, "")]
    message = "while testing: rank 1: ValueError: bad 1 (and 1 other rank failed)"
    assert workers.run(3, _gather, [1, 2]) == [(None, message)] * 3
