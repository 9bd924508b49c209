"""Failures of a job: it ends within seconds, with the words of who failed first, and loses nothing.

The workers are real processes that run the entry point; see ``tests/end_to_end/processes.py``.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flex.checkpoint.layout import iterations_in, latest
from megatron_flex.checkpoint.load import verify
from megatron_flex.runtime import failure
from megatron_flex.runtime.failure import EXIT_PEER_LOST
from megatron_flex.runtime.world import World
from tests.distributed import jobs
from tests.distributed.pool import WorkerError, WorkerPool
from tests.end_to_end.processes import Job
from tests.end_to_end.runs import write_documents
from tests.unit.data.files import write_flat

MODEL = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 128"
    " --tokenizer-type NullTokenizer --distributed-backend gloo --num-workers 0"
)
TRAINING = shlex.split("--micro-batch-tokens 128 --global-batch-size 4 --lr 1e-3 --log-interval 1")
MOCK = ["--mock-data", "--vocab-size", "90"]
FLAGS = [*MODEL, *TRAINING, *MOCK]
UNEVEN = ["--flexpipe-plan", "0:3@0,1 | 3:6@2"]  # three workers; the last one prints
ENDLESS = [*FLAGS, *UNEVEN, "--train-iters", "100000"]
SECONDS = 15.0
"""A failure ends the job within a few seconds; this allows for a machine that is busy."""


def saving(directory: Path, interval: int = 100000) -> list[str]:
    return ["--save", str(directory), "--load", str(directory), "--save-interval", str(interval)]


def alone(iterations: int, *more: str) -> list[str]:
    return [*FLAGS, "--train-iters", str(iterations), *more]


def assert_nothing_is_left(job: Job) -> None:
    """No process, and the port is free again."""
    assert not any(process.is_alive() for process in job.processes)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", job.port))


# ---- a worker fails --------------------------------------------------------------------------


def iterations(log: Path) -> list[int]:
    """Those of which a log has a line."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["iteration"] for line in lines if line["event"] == "iteration"]


def bug_in_worker_1(rank: int) -> None:
    """The third iteration fails on worker 1."""
    from megatron_flex.training import Trainer

    step = Trainer._step

    def broken(self: Trainer, *arguments: Any) -> Any:
        if rank == 1 and self.progress.iteration == 2:
            raise KeyError("a bug in this worker")
        return step(self, *arguments)

    Trainer._step = broken  # type: ignore[method-assign, assignment]


def test_a_worker_that_raises_ends_the_job_with_its_own_error(tmp_path: Path) -> None:
    with Job(tmp_path / "job") as job:
        flags = [*ENDLESS, *saving(tmp_path / "checkpoints")]
        job.start("pretrain_gpt.py", flags, size=3, before=bug_in_worker_1)
        job.wait_for("iteration        2/", 2)
        start = time.monotonic()
        assert job.wait() == [EXIT_PEER_LOST, 1, EXIT_PEER_LOST]
        assert time.monotonic() - start < SECONDS
    assert job.output.count("Traceback") == 1
    assert "KeyError: 'a bug in this worker'" in job.text(1)
    for peer in (0, 2):
        assert f"worker {peer} ends because worker 1 failed: KeyError: 'a bug" in job.text(peer)
        assert not job.error_file(peer).exists()  # the launcher's report names the cause alone
    told = json.loads(job.error_file(1).read_text())["message"]["message"]
    assert told.startswith("error in worker 1: KeyError: 'a bug in this worker'")
    assert latest(tmp_path / "checkpoints") is None, "a failed job must not save"
    assert_nothing_is_left(job)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_worker_ends_the_job_without_saving(tmp_path: Path, victim: int) -> None:
    with Job(tmp_path / "job") as job:
        flags = [*ENDLESS, *saving(tmp_path / "checkpoints"), "--exit-signal-handler"]
        # Worker 0 holds the store here, and takes it along.
        job.start("pretrain_gpt.py", flags, size=3, agent=False)
        job.wait_for("iteration        2/", 2)
        start = time.monotonic()
        job.signal(victim, signal.SIGKILL)
        expected = [EXIT_PEER_LOST] * 3
        expected[victim] = -signal.SIGKILL
        assert job.wait() == expected
        assert time.monotonic() - start < SECONDS
    for peer in {0, 1, 2} - {victim}:
        assert re.search(rf"error: worker {peer}: '.*' failed", job.text(peer))
    assert "Traceback" not in job.output
    assert os.listdir(tmp_path / "checkpoints") in ([], [".checkpoint.lock"])
    assert_nothing_is_left(job)


def test_a_killed_worker_of_those_that_share_layers_ends_the_job(tmp_path: Path) -> None:
    with Job(tmp_path / "job") as job:
        shared = ["--tensor-model-parallel-size", "2", "--train-iters", "100000"]
        job.start("pretrain_gpt.py", [*FLAGS, *shared], size=2)
        job.wait_for("iteration        2/", 1)
        start = time.monotonic()
        job.signal(0, signal.SIGKILL)
        assert job.wait() == [-signal.SIGKILL, EXIT_PEER_LOST]
        assert time.monotonic() - start < SECONDS
    assert re.search(r"error: worker 1: '.*' failed", job.text(1))
    assert "Traceback" not in job.output
    assert_nothing_is_left(job)


def late_worker(sleeper: int, given_up: Path) -> None:
    """One worker does not begin before the other has given up, after a time-out of 1 s."""
    world = World.create(torch.device("cpu"), timedelta(seconds=1))
    if dist.get_rank() == sleeper:
        deadline = time.monotonic() + 60
        while not given_up.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return
    World.create = classmethod(lambda cls, *_, **__: world)  # type: ignore[method-assign, assignment]
    try:
        jobs.train(jobs.TINY, "0:3@0 | 3:8@1", 1)
    finally:
        given_up.touch()


@pytest.mark.parametrize(("sleeper", "waited_for"), [(0, "RecvActivation"), (1, "RecvGradient")])
def test_a_wait_that_is_too_long_says_what_it_waited_for(
    sleeper: int, waited_for: str, tmp_path: Path
) -> None:
    pool = WorkerPool()  # of its own: its workers are not fit for use afterwards
    try:
        with pytest.raises(WorkerError) as caught:
            pool.run(2, late_worker, sleeper, tmp_path / "given up")
    finally:
        pool.close()
    assert caught.value.kind == "CommunicationError"
    assert re.search(
        rf"worker {1 - sleeper}: '{waited_for} .* peer={sleeper} .*time-out 1 s", str(caught.value)
    )


# ---- stopping on request ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT (Ctrl-C)")]
)
def test_a_signal_to_any_worker_saves_after_the_iteration_and_ends_all_with_status_0(
    tmp_path: Path, number: signal.Signals, name: str
) -> None:
    checkpoints, log = tmp_path / "checkpoints", tmp_path / "log.jsonl"
    more = [*saving(checkpoints), "--exit-signal-handler", "--log-jsonl", str(log)]
    with Job(tmp_path / "job").start("pretrain_gpt.py", [*ENDLESS, *more], size=3) as job:
        job.wait_for("iteration        3/", 2)
        for rank in (1, 2) if number == signal.SIGINT else (1,):  # a terminal tells several
            job.signal(rank, number)
        assert job.wait(SECONDS) == [0, 0, 0]
    assert f"exiting program after receiving {name}." in job.text(2)
    assert "Traceback" not in job.output
    saved = latest(checkpoints)
    assert saved is not None
    verify(checkpoints, saved)
    done = iterations(log)
    assert done == list(range(1, saved + 1)), "what was trained is saved, to the last iteration"


def test_sigterm_cuts_a_validation_short(tmp_path: Path) -> None:
    more = shlex.split("--eval-interval 2 --eval-iters 5000 --split 1,1,0 --exit-signal-handler")
    flags = [*ENDLESS, *more, *saving(tmp_path / "checkpoints")]
    with Job(tmp_path / "job").start("pretrain_gpt.py", flags, size=3) as job:
        job.wait_for("iteration        2/", 2)
        time.sleep(0.5)
        job.signal(0, signal.SIGTERM)
        assert job.wait(SECONDS) == [0, 0, 0]
    assert latest(tmp_path / "checkpoints") == 2
    assert "validation loss" not in job.output  # a part of a validation set is no result


def test_without_the_handler_sigterm_ends_a_worker_as_usual(tmp_path: Path) -> None:
    flags = [*alone(100000), *saving(tmp_path / "checkpoints")]
    with Job(tmp_path / "job").start("pretrain_gpt.py", flags) as job:
        job.wait_for("iteration        2/", 0)
        job.signal(0, signal.SIGTERM)
        assert job.wait(SECONDS) == [-signal.SIGTERM]
    assert latest(tmp_path / "checkpoints") is None


# ---- meeting ---------------------------------------------------------------------------------


def test_a_worker_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    flags = [*FLAGS, *UNEVEN, "--train-iters", "2"]
    start = time.monotonic()
    with Job(tmp_path).start("pretrain_gpt.py", flags, size=3, delays=(0, 0, 2)) as job:
        assert job.wait() == [0, 0, 0]
    assert time.monotonic() - start > 2
    assert "iteration        2/       2" in job.text(2)


def test_a_port_in_use_is_one_clear_error_at_once(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        flags = alone(2, "--pipeline-model-parallel-size", "2")
        with Job(tmp_path).start("pretrain_gpt.py", flags, environment=environment) as job:
            assert job.wait(SECONDS) == [1]
    assert re.search(rf"^error: worker 0: another program uses port {port}", job.output, re.M)
    assert "--master-port" in job.output
    assert "Traceback" not in job.output


def test_a_number_of_workers_that_is_no_multiple_is_refused_by_one_voice(tmp_path: Path) -> None:
    flags = alone(2, "--pipeline-model-parallel-size", "2")
    with Job(tmp_path).start("pretrain_gpt.py", flags, size=3) as job:
        assert job.wait(SECONDS) == [2, 2, 2]
    assert job.output.count("error: 3 workers are no multiple of --pipeline-model-parallel-size 2")
    assert len(job.output.splitlines()) == 1
    told = json.loads(job.error_file(0).read_text())["message"]["message"]
    assert told in f"error: {job.output.split('error: ')[1]}"


def test_an_incomplete_environment_is_one_clear_error(tmp_path: Path) -> None:
    environment = {"WORLD_SIZE": "2"}
    with Job(tmp_path).start("pretrain_gpt.py", alone(2), environment=environment) as job:
        assert job.wait(SECONDS) == [1]
    assert "error: WORLD_SIZE is 2 but MASTER_ADDR, MASTER_PORT is not set" in job.output


# ---- bad input -------------------------------------------------------------------------------


def impatient(rank: int) -> None:
    """Workers that lost a peer give way for a moment only."""
    failure.GRACE = 0.3


def refused(directory: Path, flags: list[str], size: int = 2, before: Any = impatient) -> str:
    """Run a job that must end with one message and no traceback; returns the message."""
    with Job(directory).start("pretrain_gpt.py", flags, size=size, before=before) as job:
        statuses = job.wait(30)
    assert 0 not in statuses
    assert statuses.count(1) >= 1
    errors = re.findall(r"^error: (?!worker \d ends because)(.*)$", job.output, re.M)
    assert len(errors) == 1, f"not one clear message:\n{job.output}"
    assert "Traceback" not in job.output
    return str(errors[0])


def on_disk(prefix: str, *more: str) -> list[str]:
    data = ["--data-path", prefix, "--split", "1,0,0", "--vocab-size", "90", "--train-iters", "3"]
    return [*MODEL, *TRAINING, *data, "--pipeline-model-parallel-size", "2", *more]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def corrupt(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[2] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("ending", "harm", "message"),
    [
        (".idx", Path.unlink, "text.idx does not exist"),
        (".bin", truncate, "text.bin is truncated"),
        (".idx", truncate, "text.idx is truncated"),
        (".idx", corrupt, "text.idx is not the index of a Megatron data set"),
    ],
)
def test_a_damaged_data_set_is_said_once(
    tmp_path: Path, ending: str, harm: Any, message: str
) -> None:
    prefix = write_documents(tmp_path / "text")
    harm(Path(prefix + ending))
    assert message in refused(tmp_path / "job", on_disk(prefix))


def test_an_empty_data_set_is_said_once(tmp_path: Path) -> None:
    prefix = write_flat(tmp_path / "empty", [])
    assert "is empty (0 documents" in refused(tmp_path / "job", on_disk(prefix))


def test_a_token_outside_the_vocabulary_that_one_worker_meets_is_said_once(tmp_path: Path) -> None:
    # The first and the last 65,536 tokens are looked at when a data set is opened; not this one.
    documents = [[5] * 1000 for _ in range(150)]
    documents[75][3] = 95
    prefix = write_flat(tmp_path / "text", documents)
    flags = [*on_disk(prefix), "--train-iters", "100"]
    message = refused(tmp_path / "job", flags)
    assert "token id 95" in message
    assert "document 75) is outside the vocabulary of 91 tokens" in message


def test_a_read_only_data_directory_is_enough(tmp_path: Path) -> None:
    data = tmp_path / "data"
    prefix = write_documents(data / "text")
    before = sorted((p, p.stat().st_mtime_ns) for p in (data, *data.iterdir()))
    data.chmod(0o555)  # no hindrance for root, hence the comparison
    try:
        with Job(tmp_path / "job").start("pretrain_gpt.py", on_disk(prefix), size=2) as job:
            assert job.wait() == [0, 0]
    finally:
        data.chmod(0o755)
    assert sorted((p, p.stat().st_mtime_ns) for p in (data, *data.iterdir())) == before


def test_a_save_directory_that_cannot_be_written_is_said_before_training(tmp_path: Path) -> None:
    flags = [*on_disk(write_documents(tmp_path / "text")), *saving(Path("/proc/checkpoints"))]
    assert "/proc/checkpoints" in refused(tmp_path / "job", flags)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints of iterations 1 and 2, written by two workers."""
    directory = tmp_path_factory.mktemp("finished")
    flags = [*alone(2, "--pipeline-model-parallel-size", "2"), *saving(directory / "saved", 1)]
    with Job(directory / "job").start("pretrain_gpt.py", flags, size=2) as job:
        assert job.wait() == [0, 0]
    assert iterations_in(directory / "saved") == [1, 2]
    return directory / "saved"


def test_a_truncated_checkpoint_is_said_once_and_the_one_before_resumes(
    tmp_path: Path, finished: Path
) -> None:
    part = next((finished / "iter_0000002").glob("*.distcp"))
    content = part.read_bytes()
    truncate(part)
    try:
        flags = alone(3, "--load", str(finished), "--override-opt_param-scheduler")
        message = refused(tmp_path / "job", [*flags, "--flexpipe-plan", "0:6@0,1"])
        assert f"{part} is truncated" in message
        with Job(tmp_path / "again").start("pretrain_gpt.py", [*flags, "--ckpt-step", "1"]) as job:
            assert job.wait() == [0]
        assert "starting at iteration 1" in job.output
    finally:
        part.write_bytes(content)


def test_a_checkpoint_of_another_model_names_what_differs(tmp_path: Path, finished: Path) -> None:
    flags = alone(3, "--load", str(finished), "--hidden-size", "64", "--swiglu")
    message = refused(tmp_path / "job", flags, size=1)
    assert "the checkpoint is of another model" in message
    assert "hidden_size is 32 in the checkpoint and 64 in this run" in message
    assert "swiglu is false in the checkpoint and true in this run" in message


def test_a_checkpoint_of_another_schedule_names_the_flag(tmp_path: Path, finished: Path) -> None:
    message = refused(tmp_path / "job", alone(3, "--load", str(finished), "--lr", "5e-3"), size=1)
    assert "--lr: checkpoint 0.001, flags 0.005" in message


def full_disk(rank: int) -> None:
    """Files of worker 1 cannot grow beyond 4,000 bytes: as errno ENOSPC, but for one process."""
    impatient(rank)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        from megatron_flex.loop.checkpointing import Checkpoints

        save = Checkpoints.save

        def limited(self: Checkpoints, progress: Any, *arguments: Any, **named: Any) -> None:
            if progress.iteration == 4:
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
            save(self, progress, *arguments, **named)

        Checkpoints.save = limited  # type: ignore[method-assign]


@pytest.mark.parametrize("more", [(), ("--async-save",)])
def test_a_disk_that_fills_up_is_said_once_and_the_previous_checkpoint_stays(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    directory = tmp_path / "saved"
    flags = [*alone(8, "--pipeline-model-parallel-size", "2"), *saving(directory, 2), *more]
    message = refused(tmp_path / "job", flags, before=full_disk)
    assert "while writing the checkpoint of iteration 4: rank 1:" in message
    assert latest(directory) == 2
    verify(directory)
    assert [p.name for p in directory.iterdir() if p.name.startswith(".tmp")] == []


@pytest.mark.parametrize("flag", ["--log-jsonl", "--flexpipe-trace"])
def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").write_text("")
    flags = alone(2, "--pipeline-model-parallel-size", "2", flag, str(tmp_path / "file/log"))
    message = refused(tmp_path / "job", flags)
    assert message.startswith(f"{flag} {tmp_path}/file/log cannot be written")


def harmed_files(rank: int) -> None:
    """From the fourth iteration on no file but a checkpoint's takes more than ten bytes a write."""
    import errno

    from megatron_flex.telemetry import files
    from megatron_flex.training import Trainer

    class Full:
        """The system's functions on a disk that is full."""

        full = False

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, file: int, data: Any) -> int:
            if self.full and len(data) <= 10:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return os.write(file, data[:10] if self.full else data)

    disk = Full()
    files.os = disk  # type: ignore[assignment]
    step = Trainer._step

    def watched(self: Trainer, *arguments: Any) -> Any:
        disk.full = self.progress.iteration >= 3
        return step(self, *arguments)

    Trainer._step = watched  # type: ignore[method-assign, assignment]


def test_a_disk_that_fills_up_under_the_logs_costs_the_logs_alone(tmp_path: Path) -> None:
    names = ("log-file", "log-jsonl", "flexpipe-record", "flexpipe-trace", "tensorboard-dir")
    outputs = [word for name in names for word in (f"--{name}", str(tmp_path / name))]
    more = [*saving(tmp_path / "saved", 2), "--async-save", "--tensorboard-queue-size", "1"]
    flags = [*alone(6, "--pipeline-model-parallel-size", "2"), *more, *outputs]
    with Job(tmp_path / "job") as job:
        job.start("pretrain_gpt.py", flags, size=2, before=harmed_files)
        assert job.wait() == [0, 0], job.output
    warned = re.findall(r"^ warning: --(\S+) .* cannot be written: No space left", job.output, re.M)
    assert sorted(warned) == sorted(
        (*names, "flexpipe-trace")
    )  # each worker has a part of the trace
    assert "Traceback" not in job.output
    assert latest(tmp_path / "saved") == 6
    verify(tmp_path / "saved")
    done = iterations(tmp_path / "log-jsonl")
    assert done == [1, 2, 3]
    assert len((tmp_path / "flexpipe-record").read_text().splitlines()) == 3
    events = json.loads((tmp_path / "flexpipe-trace").read_text())["traceEvents"]
    assert {e["args"]["iteration"] for e in events if e.get("ph") == "X"} == {1, 2, 3}
