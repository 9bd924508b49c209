"""Workers die and come back: training continues from host memory as if nothing had happened."""

from __future__ import annotations

import os
import random
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs
from tests.end_to_end.elastic import Elastic, assert_nothing_is_left, losses

SIZE = 3
PLANS = "0:3@0,1 | 3:8@2\n0:3@0,1 | 3:8@2\n0:5@2 | 5:8@0,1\n0:2@1 | 2:5@0 | 5:8@2\n"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small model on data of very uneven lengths, on plans that change from line to line."""
    directory = tmp_path_factory.mktemp("data")
    prefix = runs.write_documents(directory / "text")
    script = directory / "plans.txt"
    script.write_text(30 * PLANS)
    more = f"--data-path {prefix} --split 1,0,0 --flexpipe-plans {script} --flexpipe-bitwise"
    return [*runs.MODEL, *runs.TRAINING, *shlex.split(more)]


def start(
    directory: Path, flags: list[str], iterations: int, *more: str, max_restarts: int = 100,
    runtime: Path | None = None, before: Callable[[int], None] | None = None,
) -> Elastic:
    argv = [*flags, "--train-iters", str(iterations), "--log-jsonl", str(directory / "log.jsonl")]
    return Elastic(
        directory, "pretrain_gpt.py", [*argv, *more], size=SIZE, max_restarts=max_restarts,
        runtime=runtime, before=before,
    )  # fmt: skip


def undisturbed(workers: WorkerPool, flags: list[str], iterations: int) -> dict[int, list[float]]:
    """Loss and norm of each iteration of a run in which nothing happens."""
    found = runs.run(workers, SIZE, [*flags, "--train-iters", str(iterations)], timeout=600.0)
    records = zip(found.losses, found.norms, strict=True)
    return {i: [*loss, norm] for i, (loss, norm) in enumerate(records, 1)}  # type: ignore[list-item]


def reached(job: Elastic, iteration: int) -> Callable[[], bool]:
    return lambda: max(losses(job.directory / "log.jsonl"), default=0) >= iteration


def starts(job: Elastic) -> list[str]:
    """Where each attempt that came so far started from."""
    return [line.strip() for line in job.output.splitlines() if "starting at iteration" in line]


def test_killed_workers_come_back_and_the_loss_curve_is_that_of_an_undisturbed_run(
    workers: WorkerPool, flags: list[str], tmp_path: Path, count: Callable[[int, int], int]
) -> None:
    kills, rng = count(3, 20), random.Random(6)
    iterations = 12 * kills
    every = "--flexpipe-switch handover --flexpipe-twin-snapshot 2".split()
    expected = undisturbed(workers, flags, iterations)
    with start(tmp_path / "job", flags, iterations, *every) as job:
        for kill in range(kills):
            # Most kills meet training somewhere, some the start of the workers.
            wanted = rng.randint(10 * kill + 3, 10 * kill + 10)
            status = job.run(120.0, reached(job, wanted))
            assert status is None, job.output
            time.sleep(rng.uniform(0.0, 0.1))
            job.kill(rng.randrange(SIZE))
            if kill % 5 == 4:  # another one at once, while the workers start
                job.watch()
                job.run(60.0, lambda until=time.monotonic() + rng.uniform(0, 3): (
                    time.monotonic() > until
                ))
                job.kill(rng.randrange(SIZE))
        assert job.run(300.0) == 0, job.output
        assert job.attempts >= 1 + kills
        found = starts(job)
        assert sum("in host memory" in line for line in found) >= kills, found
    assert losses(tmp_path / "job" / "log.jsonl") == expected
    assert_nothing_is_left(job.runtime)


def test_a_killed_manager_is_said_once_and_the_disk_takes_its_place(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    saves = tmp_path / "checkpoints"
    every = f"--flexpipe-twin-snapshot 2 --save {saves} --load {saves} --save-interval 8".split()
    expected = undisturbed(workers, flags, 24)
    with start(tmp_path / "job", flags, 24, *every) as job:
        assert job.run(60.0, reached(job, 3)) is None, job.output
        (manager,) = job.managers()
        os.kill(manager["pid"], signal.SIGKILL)
        assert job.run(60.0, reached(job, 12)) is None, job.output
        warnings = [line for line in job.output.splitlines() if "warning" in line]
        assert len(warnings) == 1
        assert "the manager of host copies of this server" in warnings[0]
        assert "has ended. Training goes on" in warnings[0]
        job.kill(1)
        assert job.run(120.0) == 0, job.output
        assert "random weights" in starts(job)[0]
        assert f"iteration 8 of {saves}: starting at iteration 8" in starts(job)[1]
    assert losses(tmp_path / "job" / "log.jsonl") == expected
    assert_nothing_is_left(job.runtime)


def test_two_jobs_on_one_server_do_not_meet(flags: list[str], tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    every = ["--flexpipe-twin-snapshot", "1"]
    with (
        start(tmp_path / "first", flags, 12, *every, runtime=runtime) as first,
        start(tmp_path / "second", flags, 12, *every, "--seed", "4", runtime=runtime) as second,
    ):
        assert first.run(60.0, lambda: len(first.managers()) == 2) is None, first.output
        jobs = [manager["job"] for manager in first.managers()]
        assert len(set(jobs)) == 2
        first.run(60.0, reached(first, 4))
        first.kill(0)
        assert second.run(120.0) == 0, second.output
        assert first.run(120.0) == 0, first.output
        assert any("in host memory" in line for line in starts(first))
    assert losses(tmp_path / "first" / "log.jsonl") != losses(tmp_path / "second" / "log.jsonl")
    assert_nothing_is_left(runtime)


def test_a_job_that_cannot_be_restarted_leaves_nothing_behind(
    flags: list[str], tmp_path: Path
) -> None:
    every = ["--flexpipe-twin-snapshot", "1"]
    with start(tmp_path / "job", flags, 1000, *every, max_restarts=0) as job:
        assert job.run(60.0, reached(job, 3)) is None, job.output
        job.kill(2)
        assert job.run(60.0) == -signal.SIGKILL
    assert_nothing_is_left(job.runtime, timeout=15.0)


def huge_slabs(rank: int) -> None:
    """As if every slab had a petabyte."""
    from megatron_flex.loop import host_copies

    host_copies.entry_bytes = lambda size: 10**15  # type: ignore[assignment]


def small_bank(rank: int) -> None:
    """As if the arena were made for less than a version."""
    from megatron_flex.loop.host_copies import HostCopies
    from megatron_flex.twinlayer.manager import Shape

    HostCopies._shape = lambda *_, **__: Shape(2, 40 << 10, 0)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (huge_slabs, "bytes of memory, but only"),
        (small_bank, "the arena is exhausted: slab"),
    ],
)
def test_too_little_memory_is_said_in_one_sentence(
    flags: list[str], tmp_path: Path, before: Callable[[int], None], words: str
) -> None:
    every = ["--flexpipe-twin-snapshot", "2"]
    with start(tmp_path / "job", flags, 12, *every, max_restarts=0, before=before) as job:
        assert job.run(60.0) == 1, job.output
        errors = [line for line in job.output.splitlines() if line.startswith("error")]
        assert words in errors[0]
        assert "Traceback" not in job.output
    assert_nothing_is_left(job.runtime, timeout=15.0)
