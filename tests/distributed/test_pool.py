"""The worker pool: results, errors, time-outs, deaths, and jobs that leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_flex.model.config import ModelConfig
from tests.distributed import jobs
from tests.distributed.pool import MAX_WORKERS, WorkerError, WorkerPool, WorkerTimeout


def _sum_of_ranks(offset: int) -> tuple[int, int, float]:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return os.getpid(), dist.get_rank(), value.item()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("the reason of rank")
    dist.barrier()


def _stuck_here() -> None:
    time.sleep(60)


def _hang_on(rank: int) -> int:
    if dist.get_rank() == rank:
        _stuck_here()
    return dist.get_rank()


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _leave_state_behind() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    dist.new_group([0, 1])


def _state() -> tuple[str | None, str, int, torch.dtype, bool, int]:
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    left = os.environ.get("LEFT_BEHIND")
    return left, os.getcwd(), torch.get_num_threads(), dtype, grad, dist.get_world_size()


def _random_number() -> float:
    return torch.rand(()).item()


def _start_a_child(path: str) -> None:
    child = subprocess.Popen(["sleep", "60"])
    Path(path).write_text(str(child.pid))
    _stuck_here()


def test_results_come_back_by_rank_and_processes_are_reused(workers: WorkerPool) -> None:
    first = workers.run(2, _sum_of_ranks, 1)
    second = workers.run(4, _sum_of_ranks, 0)
    assert [(rank, total) for _, rank, total in first] == [(0, 3.0), (1, 3.0)]
    assert [(rank, total) for _, rank, total in second] == [(rank, 6.0) for rank in range(4)]
    assert [pid for pid, _, _ in second[:2]] == [pid for pid, _, _ in first]


def test_the_failing_worker_is_reported_with_its_own_traceback(workers: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="the reason of rank") as caught:
        workers.run(3, _fail_on, 1)
    assert (caught.value.rank, caught.value.kind) == (1, "KeyError")
    assert "in _fail_on" in str(caught.value)
    assert len(workers.run(3, _sum_of_ranks, 0)) == 3


def test_a_hanging_worker_is_named_with_its_stack_and_the_pool_recovers() -> None:
    pool = WorkerPool()
    try:
        with pytest.raises(WorkerTimeout, match="waited for rank 1") as caught:
            pool.run(2, _hang_on, 1, timeout=5.0)
        assert "in _stuck_here" in str(caught.value)
        assert len(pool.run(2, _sum_of_ranks, 0)) == 2
    finally:
        pool.close()


def test_a_dead_worker_is_reported_with_exit_code_and_output() -> None:
    pool = WorkerPool()
    try:
        with pytest.raises(WorkerError, match="exit code -9") as caught:
            pool.run(2, _die_on, 1)
        assert "last words" in str(caught.value)
        assert len(pool.run(2, _sum_of_ranks, 0)) == 2
    finally:
        pool.close()


def test_killing_the_pool_ends_the_processes_its_workers_started(tmp_path: Path) -> None:
    pool = WorkerPool()
    try:
        with pytest.raises(WorkerTimeout):
            pool.run(1, _start_a_child, str(tmp_path / "pid"), timeout=5.0)
    finally:
        pool.close()
    child = Path("/proc") / (tmp_path / "pid").read_text()
    deadline = time.monotonic() + 5
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < deadline, "the worker's child is still alive"
        time.sleep(0.05)


def test_a_job_leaves_no_state_for_the_next(workers: WorkerPool) -> None:
    before = workers.run(2, _state)
    workers.run(2, _leave_state_behind)
    assert workers.run(2, _state) == before
    assert before[0][2:] == (1, torch.float32, True, 2)


def test_random_numbers_are_the_same_in_every_run_of_a_job(workers: WorkerPool) -> None:
    assert workers.run(2, _random_number) == workers.run(2, _random_number)


def _compiler() -> list[str]:
    return [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]


def _trained(config: ModelConfig) -> list[str]:
    jobs.train(config, f"0:{config.layers.num_units}@0", 1)
    return _compiler()


def test_a_worker_starts_and_trains_without_pytorchs_compiler() -> None:
    pool = WorkerPool()  # new workers: other tests import what training does not
    try:
        for _ in range(2):  # nor does a job leave it behind
            assert pool.run(1, _compiler) == [[]], "seconds and 70 MB for each worker"
        for config in (jobs.TINY, jobs.BERT):
            assert pool.run(1, _trained, config) == [[]], "seconds and 70 MB for each worker"
    finally:
        pool.close()


def test_more_workers_than_the_pool_has_are_refused(workers: WorkerPool) -> None:
    with pytest.raises(ValueError, match=f"1 to {MAX_WORKERS} workers"):
        workers.run(MAX_WORKERS + 1, _state)
