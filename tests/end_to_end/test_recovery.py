"""Workers die and come back: training continues from host memory as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_flex.checkpoint.layout import latest
from megatron_flex.checkpoint.load import verify
from megatron_flex.twinlayer.location import DIRECTORY
from megatron_flex.twinlayer.worker import Member, TwinLayers, Version
from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs
from tests.end_to_end.elastic import (
    Elastic,
    assert_nothing_is_left,
    losses,
    short_directory,
)
from tests.end_to_end.processes import ROOT

SIZE = 3
PER_KILL = 12  # iterations
PLANS = (
    "0:3@0,1 | 3:8@2 ; shard 0-7\n0:3@0,1 | 3:8@2 ; shard 0-7\n0:5@2 | 5:8@0,1 ; shard 6\n"
    "0:2@1 | 2:5@0 | 5:8@2\n"
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small model on data of very uneven lengths, on plans that change from line to line.

    Nearly all samples are cut to slices, so that who is killed is in the middle of some chain.
    """
    directory = tmp_path_factory.mktemp("data")
    prefix = runs.write_documents(directory / "text")
    script = directory / "plans.txt"
    script.write_text(30 * PLANS)
    more = f"--data-path {prefix} --split 1,0,0 --flexpipe-plans {script} --flexpipe-bitwise"
    more += " --lr-decay-iters 240 --flexpipe-slice-tokens 12"
    return [*runs.MODEL, *runs.TRAINING, *shlex.split(more)]


def start(
    directory: Path,
    flags: list[str],
    iterations: int,
    *more: str,
    max_restarts: int = 100,
    runtime: Path | None = None,
    before: Callable[[int], None] | None = None,
) -> Elastic:
    argv = [*flags, "--train-iters", str(iterations), "--log-jsonl", str(directory / "log.jsonl")]
    return Elastic(
        directory, "pretrain_gpt.py", [*argv, *more], size=SIZE, max_restarts=max_restarts,
        runtime=runtime, before=before,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(
    workers: WorkerPool, flags: list[str], count: Callable[[int, int], int]
) -> dict[int, list[float]]:
    """Loss and norm of each iteration of a run in which nothing happens."""
    iterations = str(PER_KILL * count(2, 20))
    found = runs.run(workers, SIZE, [*flags, "--train-iters", iterations], timeout=600.0)
    assert min(r.extra["slices"] / r.extra["micro-batches"] for r in found.history.iterations) > 0.5
    pairs = zip(found.losses, found.norms, strict=True)
    return {i: [*loss, norm or 0.0] for i, (loss, norm) in enumerate(pairs, 1)}


def first(expected: dict[int, list[float]], iterations: int) -> dict[int, list[float]]:
    return {i: values for i, values in expected.items() if i <= iterations}


def reached(job: Elastic, iteration: int) -> Callable[[], bool]:
    return lambda: max(losses(job.directory / "log.jsonl"), default=0) >= iteration


def starts(job: Elastic) -> list[str]:
    """Where each attempt that came so far started from."""
    return [line.strip() for line in job.output.splitlines() if "starting at iteration" in line]


def two_servers(rank: int) -> None:
    """As if worker 0 had a server of its own, and the others another."""
    from megatron_flex.loop import host_copies

    host_copies._server = lambda: f"server {min(rank, 1)}"


@pytest.mark.parametrize(("servers", "few", "many"), [(1, 2, 20), (2, 1, 10)])
def test_killed_workers_come_back_and_the_loss_curve_is_that_of_an_undisturbed_run(
    flags: list[str], undisturbed: dict[int, list[float]], tmp_path: Path,
    count: Callable[[int, int], int], servers: int, few: int, many: int,
) -> None:  # fmt: skip
    kills, rng = count(few, many), random.Random(servers)
    iterations = PER_KILL * kills
    every = ["--flexpipe-switch", "handover", "--flexpipe-twin-snapshot", "2"]
    before = two_servers if servers > 1 else None
    with start(tmp_path / "job", flags, iterations, *every, before=before) as job:
        landed = 0
        for kill in range(kills):
            wanted = PER_KILL * kill + rng.randint(4, PER_KILL - 3)
            if job.run(120.0, reached(job, wanted)) is not None:
                break  # the machine was faster than this test
            assert len(job.managers()) == servers
            time.sleep(rng.uniform(0.0, 0.1))
            attempts = len(starts(job))
            landed += job.kill(rng.randrange(SIZE))
            if kill % 5 == 4:  # another one at once, while the workers start
                until = time.monotonic() + rng.uniform(0.0, 2.0)
                job.run(60.0, lambda until=until: time.monotonic() > until)  # type: ignore[misc]
                landed += job.kill(rng.randrange(SIZE))
            job.run(120.0, lambda seen=attempts: len(starts(job)) > seen)  # type: ignore[misc]
        assert job.run(300.0) == 0, job.output
        assert landed >= kills / 2
        assert job.attempts > kills / 2
        found = starts(job)
        assert "random weights" in found[0]
        assert all("in host memory" in line for line in found[1:]), found
    assert losses(tmp_path / "job" / "log.jsonl") == first(undisturbed, iterations)
    assert_nothing_is_left(job.runtime)


def kill_manager(job: Elastic, server: int = 0) -> int:
    pid: int = sorted(job.managers(), key=lambda found: str(found["job"]))[server]["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def warnings(job: Elastic) -> list[str]:
    return [line for line in job.output.splitlines() if "warning" in line]


@pytest.mark.parametrize("servers", [1, 2])
def test_another_manager_takes_the_place_of_a_killed_one_and_versions_come_back(
    flags: list[str], undisturbed: dict[int, list[float]], tmp_path: Path, servers: int
) -> None:
    every = ["--flexpipe-switch", "handover", "--flexpipe-twin-snapshot", "2"]
    before = two_servers if servers > 1 else None
    with start(tmp_path / "job", flags, 24, *every, before=before) as job:
        assert job.run(60.0, reached(job, 3)) is None, job.output
        killed = kill_manager(job, servers - 1)
        assert job.run(60.0, lambda: bool(warnings(job))) is None, job.output
        seen = max(losses(tmp_path / "job" / "log.jsonl"))
        assert job.run(60.0, reached(job, seen + 6)) is None, job.output
        (warning,) = warnings(job)
        assert "the manager of host copies of this server" in warning
        assert "has ended. Training goes on with a new one." in warning
        assert killed not in [found["pid"] for found in job.managers()]
        for process in job.processes:  # the memory of the first one is given back
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert maps.count("memfd:megatron-flex-twin") == 1
        assert len(job.managers()) == servers
        job.kill(1)
        assert job.run(120.0) == 0, job.output
        found = starts(job)[1]
        assert "in host memory" in found
        assert int(found.rpartition(" ")[2]) >= seen
    assert losses(tmp_path / "job" / "log.jsonl") == first(undisturbed, 24)
    assert_nothing_is_left(job.runtime)


def one_manager(rank: int) -> None:
    """As if there were no memory left for a second manager."""
    from megatron_flex.loop import host_copies
    from megatron_flex.twinlayer.errors import TwinError

    start_ = host_copies.start
    started: list[bool] = []

    def once(*arguments: Any) -> bool:
        if started:
            raise TwinError("the manager of host copies cannot run: too little memory")
        started.append(True)
        return start_(*arguments)

    host_copies.start = once  # type: ignore[assignment]


def test_without_a_second_manager_it_is_said_once_and_the_disk_takes_its_place(
    flags: list[str], undisturbed: dict[int, list[float]], tmp_path: Path
) -> None:
    saves = tmp_path / "checkpoints"
    every = f"--flexpipe-switch handover --flexpipe-twin-snapshot 2 --save {saves} --load {saves}"
    more = [*every.split(), "--save-interval", "8"]
    with start(tmp_path / "job", flags, 24, *more, before=one_manager, max_restarts=1) as job:
        assert job.run(60.0, reached(job, 3)) is None, job.output
        kill_manager(job)
        assert job.run(60.0, reached(job, 12)) is None, job.output
        (warning,) = warnings(job)
        assert "has ended. Training goes on without host copies:" in warning
        assert "too little memory" in warning
        assert not list(job.runtime.glob("*"))
        job.kill(1)
        assert job.run(120.0) == 0, job.output
        assert "random weights" in starts(job)[0]
        assert f"iteration 8 of {saves}: starting at iteration 8" in starts(job)[1]
    assert losses(tmp_path / "job" / "log.jsonl") == first(undisturbed, 24)
    assert_nothing_is_left(job.runtime)


def test_a_damaged_version_is_passed_over(
    flags: list[str], undisturbed: dict[int, list[float]], tmp_path: Path
) -> None:
    every = ["--flexpipe-twin-snapshot", "3"]
    with start(tmp_path / "job", flags, 24, *every) as job:
        assert job.run(60.0, reached(job, 8)) is None, job.output
        member = Member(SIZE, "attempt 0.0", SIZE, 60.0, 10.0)
        (socket,) = job.runtime.glob("*.sock")
        visitor = TwinLayers(socket, member, torch.device("cpu"))
        whole: list[Version] = []
        while len(whole) < 2:  # two complete versions, and none that is being written
            for process in job.processes:
                os.kill(process.pid or 0, signal.SIGSTOP)
            versions = visitor.versions()
            whole = [v for v in versions if len(v.entries) == max(len(v.entries) for v in versions)]
            if len(whole) < 2:
                for process in job.processes:
                    os.kill(process.pid or 0, signal.SIGCONT)
                time.sleep(0.02)
                assert job.watch() is None, job.output
        newest, older = whole
        newest.entries[0].data[1000] ^= 1
        visitor.close()
        for rank in range(SIZE):
            job.kill(rank)
        assert job.run(120.0) == 0, job.output
        assert f"iteration {older.number} in host memory" in starts(job)[1]
    assert losses(tmp_path / "job" / "log.jsonl") == first(undisturbed, 24)
    assert_nothing_is_left(job.runtime)


def test_two_jobs_on_one_server_do_not_meet(flags: list[str], tmp_path: Path) -> None:
    runtime = short_directory(tmp_path)
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


@pytest.mark.soak  # torchrun imports PyTorch once for itself and twice for each worker
def test_torchrun_starts_the_workers_again(
    flags: list[str], undisturbed: dict[int, list[float]], tmp_path: Path
) -> None:
    log, runtime = tmp_path / "log.jsonl", short_directory(tmp_path)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(SIZE), "--max-restarts", "1", str(ROOT / "pretrain_gpt.py"), *flags,
        "--train-iters", "24", "--log-jsonl", str(log), "--flexpipe-twin-snapshot", "2",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), DIRECTORY: str(runtime)}
    with (tmp_path / "output").open("w") as output:
        launcher = psutil.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while max(losses(log), default=0) < 6:
            assert launcher.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.02)
        workers = [c for c in launcher.children() if str(ROOT / "pretrain_gpt.py") in c.cmdline()]
        assert len(workers) == SIZE
        workers[1].kill()
        assert launcher.wait(120) == 0, (tmp_path / "output").read_text()
    finally:
        if launcher.is_running():
            for process in (*launcher.children(recursive=True), launcher):
                process.kill()
    text = (tmp_path / "output").read_text()
    assert "in host memory: starting at iteration" in text
    assert losses(log) == first(undisturbed, 24)
    assert_nothing_is_left(runtime)


def huge_slabs(rank: int) -> None:
    """As if every slab had a petabyte."""
    from megatron_flex.loop import host_copies

    host_copies.entry_bytes = lambda size: 10**15


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


def killed_at_its_end(moment: str, rank: int) -> None:
    """In the first attempt worker 1 is killed after the job's last meeting."""
    if rank != 1 or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    from megatron_flex.loop.host_copies import HostCopies
    from megatron_flex.runtime import failure
    from megatron_flex.training import Trainer

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "before host copies go":
        HostCopies.close = kill  # type: ignore[method-assign, assignment]
    elif moment == "after training":
        run = Trainer.run
        Trainer.run = lambda self: kill(run(self))  # type: ignore[method-assign]
    else:
        failure._leave_groups = kill


@pytest.mark.parametrize(
    ("moment", "copies", "saves"),
    [
        ("before host copies go", True, False),
        ("after training", False, False),
        ("after training", True, True),
        ("at the exit of its process", True, False),
        ("at the exit of its process", False, True),
    ],
)
def test_a_worker_killed_after_the_end_starts_nothing_anew(
    flags: list[str], tmp_path: Path, moment: str, copies: bool, saves: bool
) -> None:
    more = ["--flexpipe-twin-snapshot", "2"] if copies else []
    saved = tmp_path / "saved"
    if saves:
        more += ["--save", str(saved), "--save-interval", "4"]
    if saves and copies:  # host copies demand it; without, a new attempt would begin anew
        more += ["--load", str(saved)]
    before = partial(killed_at_its_end, moment)
    with start(tmp_path / "job", flags, 4, *more, before=before) as job:
        assert job.run(120.0) == 0, job.output
        assert job.attempts == 2
        assert len(starts(job)) == 1, "something was trained again"
        assert "the run had ended when a worker died: nothing is left to do" in job.output
    lines = (tmp_path / "job" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [0, 1, 2, 3, 4]  # 0: of the run
    if saves:
        assert latest(saved) == 4
        verify(saved)
    assert_nothing_is_left(job.runtime)


def test_a_killed_worker_of_those_that_share_layers_comes_back(
    workers: WorkerPool, tmp_path: Path
) -> None:
    """Two devices of two workers each: those of one place have a manager."""
    prefix = runs.write_documents(tmp_path / "text")
    script = tmp_path / "plans.txt"
    script.write_text(10 * "0:3@0 | 3:8@1\n0:8@0,1\n0:5@1 | 5:8@0\n")
    more = f"--data-path {prefix} --split 1,0,0 --flexpipe-plans {script} --flexpipe-bitwise"
    more += " --tensor-model-parallel-size 2 --sequence-parallel --train-iters 14"
    argv = [*runs.MODEL, *runs.TRAINING, *shlex.split(more)]
    whole = runs.run(workers, 4, [*argv, "--flexpipe-no-twin"])
    argv += ["--flexpipe-twin-snapshot", "2", "--flexpipe-switch", "handover"]
    argv += ["--log-jsonl", str(tmp_path / "job" / "log.jsonl")]
    with Elastic(tmp_path / "job", "pretrain_gpt.py", argv, size=4, max_restarts=3) as job:
        assert job.run(120.0, reached(job, 6)) is None
        assert len(job.managers()) == 2
        assert job.kill(1)
        assert job.run(300.0) == 0, job.output
        found = starts(job)
        assert len(found) == 2
        assert "in host memory" in found[1]
    pairs = zip(whole.losses, whole.norms, strict=True)
    expected = {i: [*loss, norm or 0.0] for i, (loss, norm) in enumerate(pairs, 1)}
    assert losses(tmp_path / "job" / "log.jsonl") == expected
    assert_nothing_is_left(job.runtime)
