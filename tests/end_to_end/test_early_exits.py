"""Eleven ways to end before the first iteration: each is said once, whichever worker ends first.

Workers are started by a launcher that ends all others at the moment when one has failed. Here it is
played as in :mod:`tests.end_to_end.elastic`, where four workers start in a second, and it looks
ten times as often as torchrun does; the real torchrun is sampled.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from megatron_flex.cluster.cluster import DESCRIBED
from tests.end_to_end import runs
from tests.end_to_end.processes import ROOT, Job

SIZE = 4
LATE = 1.0  # seconds: longer than a worker takes to read its flags and end
FLAGS = [*runs.MODEL, *runs.TRAINING, *shlex.split("--split 1,0,0 --train-iters 3")]
PIPELINE = ["--flexpipe-plan", "0:2@0 | 2:4@1 | 4:6@2 | 6:8@3"]


def without_data(directory: str, rank: int) -> None:
    """Worker 2 has another working directory, in which the data set is not."""
    if rank == 2:
        os.chdir(directory)


def another_cluster(directory: str, rank: int) -> None:
    """As on two servers, of which the second has another file."""
    if rank >= 2:
        os.chdir(directory)


def huge_slabs(directory: str, rank: int) -> None:
    """As if every slab had a petabyte."""
    from megatron_flex.loop import host_copies

    host_copies.entry_bytes = lambda size: 10**15


@dataclass(frozen=True)
class Exit:
    """A kind of early exit.

    Attributes:
        flags: beside ``FLAGS``, where ``{data}`` is a data set, ``{old}`` a checkpoint of another
            model and ``{directory}`` has files that are not what they should be.
        words: a pattern of the message.
        harm: called in each worker with ``{directory}`` and its rank before the script runs.
        port_in_use: whether another program listens where worker 0 would hold the store.
    """

    flags: str
    words: str
    harm: Callable[[str, int], None] | None = None
    port_in_use: bool = False

    def command(self, **places: object) -> list[str]:
        """The words after the script's name."""
        own = shlex.split(self.flags.format(**places))
        return [*FLAGS, *(() if "--flexpipe" in own or "plan" in self.flags else PIPELINE), *own]


DATA = "--data-path {data}"
EXITS = {
    "wrong flag": Exit(f"{DATA} --no-such-flag", "--no-such-flag is unknown"),
    "contradictory flags": Exit(f"{DATA} --mock-data", "--mock-data"),
    "missing data": Exit("--data-path {directory}/none", "none.idx does not exist"),
    "corrupt index": Exit("--data-path {directory}/torn", "torn.idx is truncated"),
    "another model's checkpoint": Exit(f"{DATA} --load {{old}}", "checkpoint is of another model"),
    "one worker alone": Exit("--data-path text", "text.idx does not exist", without_data),
    "another file on one server": Exit(
        f"{DATA} --flexpipe --flexpipe-cluster cluster.yaml --tensor-model-parallel-size auto",
        "do not start from the same: .*--flexpipe-cluster is a file with .* on worker 0",
        another_cluster,
    ),
    "port in use": Exit(DATA, "another program uses port", port_in_use=True),
    "budget too small": Exit(
        f"{DATA} --flexpipe --flexpipe-memory-budget-gb 1e-5", "--flexpipe-memory-budget-gb"
    ),
    "no memory for host copies": Exit(
        f"{DATA} --flexpipe-twin-snapshot 1", "bytes of memory, but only", huge_slabs
    ),
    "bad plan file": Exit(f"{DATA} --flexpipe-plans {{directory}}/plans", "plans, line 1"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the flags of ``EXITS`` name."""
    directory, here = tmp_path_factory.mktemp("harmed"), tmp_path_factory.mktemp("here")
    data = runs.write_documents(here / "text")
    torn = Path(runs.write_documents(directory / "torn") + ".idx")
    os.truncate(torn, torn.stat().st_size - 7)
    (directory / "plans").write_text("0:2@0 | 3:8@1-3\n")
    cluster = (DESCRIBED / "cpu.yaml").read_text()
    (here / "cluster.yaml").write_text(cluster)
    (directory / "cluster.yaml").write_text(cluster.replace("60.0e+9", "70.0e+9"))
    old = here / "saved"
    flags = ["--data-path", data, "--save", str(old), "--save-interval", "1", "--hidden-size", "64"]
    with Job(here / "job").start(
        "pretrain_gpt.py", [*FLAGS, *flags, "--lr-warmup-iters", "0", "--train-iters", "1"]
    ) as job:
        assert job.wait() == [0], job.output
    return {"data": Path(data), "directory": directory, "old": old}


def play_launcher(job: Job) -> list[int]:
    """End all workers as soon as one has failed; the ranks that had, which would be reported."""
    deadline = time.monotonic() + 120
    while not (failed := [r for r, p in enumerate(job.processes) if p.exitcode not in (None, 0)]):
        assert time.monotonic() < deadline, f"nobody ends:\n{job.output}"
        time.sleep(0.01)
    for process in job.processes:
        if process.is_alive():
            process.terminate()
    job.wait(30)
    return failed


def errors_in(output: str) -> list[str]:
    """Messages of workers, without those of peers that end because of another."""
    return re.findall(
        r"^(?:\S+: )?error(?: in worker \d)?: (?!worker \d ends because).*", output, re.M
    )


def assert_seen(found: Exit, output: str, reported: list[Path]) -> None:
    """One message on the screen, and the same in the error files."""
    (message,) = errors_in(output)
    whole = output[output.index(message) :]
    assert re.search(found.words, whole), output
    assert "Traceback" not in output
    for path in reported:
        told = json.loads(path.read_text())["message"]["message"]
        assert re.search(found.words, told), told


def start_four(found: Exit, directory: Path, places: dict[str, Path], late: int) -> None:
    """Start four workers, of which ``late`` begins when the others may have ended."""
    with ExitStack() as stack:
        port = None
        if found.port_in_use:
            other = stack.enter_context(socket.socket())
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
        harm = found.harm and partial(found.harm, str(places["directory"]))
        job = stack.enter_context(Job(directory))
        job.start(
            "pretrain_gpt.py", found.command(**places), size=SIZE, port=port, before=harm,
            directory=places["data"].parent, environment={"TORCHELASTIC_MAX_RESTARTS": "0"},
            delays=[LATE if rank == late else 0.0 for rank in range(SIZE)],
        )  # fmt: skip
        failed = play_launcher(job)
        assert_seen(found, job.output, [job.error_file(rank) for rank in failed])


@pytest.mark.parametrize("kind", EXITS)
def test_every_early_exit_is_said_once(
    kind: str, tmp_path: Path, places: dict[str, Path], count: Callable[[int, int], int]
) -> None:
    seen = 0
    starts = count(1, 10)
    for number in range(starts):
        start_four(EXITS[kind], tmp_path / str(number), places, number % SIZE)
        seen += 1
    print(f"{kind}: {seen} of {starts} messages seen")


# ---- the real torchrun -----------------------------------------------------------------------


def under_torchrun(argv: list[str]) -> None:
    """What a worker runs: the harm of a kind, then the script."""
    kind, directory, *argv = argv
    harm = EXITS[kind].harm
    if harm is not None:
        harm(directory, int(os.environ["RANK"]))
    sys.argv = [str(ROOT / "pretrain_gpt.py"), *argv]
    runpy.run_path(sys.argv[0], run_name="__main__")


def torchrun(kind: str, directory: Path, places: dict[str, Path], *more: str) -> str:
    """Output of torchrun and its four workers."""
    found = EXITS[kind]
    script = [str(ROOT / "pretrain_gpt.py")]
    if found.harm is not None:
        script = ["-m", "tests.end_to_end.test_early_exits", kind, str(places["directory"])]
    command = [
        sys.executable, "-m", "torch.distributed.run", *more, "--nproc-per-node", str(SIZE),
        "--log-dir", str(directory), *script, *found.command(**places),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=places["data"].parent, capture_output=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    return done.stderr.decode()


def assert_torchrun_shows(kind: str, directory: Path, places: dict[str, Path]) -> None:
    if EXITS[kind].port_in_use:  # torchrun holds the store, and says so itself
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = str(other.getsockname()[1])
            output = torchrun(kind, directory, places, "--master-port", port)
        assert re.search(rf"port: {port}.*EADDRINUSE", output), output
        return
    output = torchrun(kind, directory, places, "--standalone")
    screen, _, report = output.partition("ChildFailedError")
    (message,) = errors_in(screen)
    assert re.search(EXITS[kind].words, screen[screen.index(message) :]), output
    assert re.search(EXITS[kind].words, report), output


def test_torchrun_shows_a_wrong_flag(tmp_path: Path, places: dict[str, Path]) -> None:
    assert_torchrun_shows("wrong flag", tmp_path, places)


@pytest.mark.soak  # each worker imports PyTorch
@pytest.mark.parametrize("kind", EXITS)
def test_torchrun_shows_every_early_exit(
    kind: str, tmp_path: Path, places: dict[str, Path]
) -> None:
    starts = 10
    for number in range(starts):
        assert_torchrun_shows(kind, tmp_path / str(number), places)
    print(f"{kind}: {starts} of {starts} messages seen under torchrun")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    under_torchrun(sys.argv[1:])
