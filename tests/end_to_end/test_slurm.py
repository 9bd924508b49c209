"""The scripts for Slurm, as they are, on a Slurm of two nodes that is started for it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron_flex.checkpoint.layout import latest
from megatron_flex.checkpoint.load import verify
from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs, slurm
from tests.end_to_end.elastic import losses
from tests.end_to_end.processes import ROOT
from tools.train_tokenizer import main as train_tokenizer

GPT = "examples/gpt/train_gpt_3.35b_slurm.sh"
BERT = "examples/bert/train_bert_large_slurm.sh"
TORCHRUN = "examples/slurm/train_gpt_torchrun_slurm.sh"
SECONDS = 10.0
"""Within which the log says which task was killed."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Cluster]:
    reason = slurm.missing()
    if reason is not None:
        pytest.skip(reason)
    with slurm.Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Documents of very different lengths, and a tokenizer of as many tokens."""
    directory = tmp_path_factory.mktemp("slurm")
    (directory / "text.jsonl").write_text('{"text": "to be or not to be"}\n' * 40)
    train_tokenizer(["--input", str(directory / "text.jsonl"), "--vocab-size", "280",
                     "--output", str(directory / "tokenizer.model")])  # fmt: skip
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(95))]
    (directory / "words.txt").write_text("\n".join(words))
    return {
        "DATA_PATH": runs.write_documents(directory / "documents"),
        "TOKENIZER_MODEL": str(directory / "tokenizer.model"),
        "VOCAB_FILE": str(directory / "words.txt"),
    }


class Batch:
    """A job that sbatch has taken."""

    def __init__(self, cluster: slurm.Cluster, directory: Path, script: str, *words: str,
                 flags: str = "", variables: dict[str, str]) -> None:  # fmt: skip
        self.cluster = cluster
        self.log = directory / "job.log"
        self.directory = directory
        place = {
            "VENV": sys.prefix,
            "CHECKPOINT_PATH": str(directory / "saved"),
            "LOG_PATH": str(directory),
            "BACKEND": "gloo",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(directory),
            "MEGATRON_FLEX_RUNTIME_DIR": str(cluster.directory / "runtime"),
        }
        argv = ["sbatch", "--parsable", f"--output={self.log}", *shlex.split(flags), script, *words]
        self.id = cluster.run(*argv, environment=place | variables, cwd=ROOT).strip()

    @property
    def text(self) -> str:
        """What the job printed so far, in all its lives."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def losses(self) -> dict[int, list[float]]:
        """Loss and norm of every iteration so far."""
        return losses(self.directory / "log.jsonl")

    def is_(self, state: str) -> bool:
        """Whether the job is in this state, and nothing of it is ending."""
        return self.cluster.state(self.id) == state

    def wait(self, what: str, done: Callable[[], bool], timeout: float = 180.0) -> float:
        """Wait until ``done()`` holds; the seconds that it took."""
        start = time.monotonic()
        while not done():
            state = self.cluster.state(self.id)
            assert time.monotonic() < start + timeout, (
                f"{what}: not in {timeout:.0f} s. The job is {state}, and printed:\n{self.text}\n"
                f"{self.cluster.logs()}"
            )
            assert state not in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), (
                f"the job is {state}, and printed:\n{self.text}\n{self.cluster.logs()}"
            )
            time.sleep(0.05)
        return time.monotonic() - start

    def wait_for_iteration(self, iteration: int) -> None:
        """Wait until an iteration is trained and logged."""
        self.wait(f"iteration {iteration}", lambda: max(self.losses, default=0) >= iteration)

    def start_again(self) -> None:
        """Wait until the job is back in the queue, and let it start without Slurm's delay.

        The delay lets the old srun end, which kills the step of its number: the new one's. And a
        slurmd refuses a job that begins in the second in which it ended (credential revoked).
        """
        self.wait("back in the queue", lambda: self.is_("PENDING"))
        self.wait("the end of all processes", lambda: not self.cluster.processes(self.id))
        self.cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now+3")


def trained_alone(workers: WorkerPool, argv: Sequence[str]) -> dict[int, list[float]]:
    """Loss and norm of every iteration of one worker with a task's flags."""
    of_the_job = {"--save": 1, "--load": 1, "--save-interval": 1, "--keep-last-n": 1,
                  "--async-save": 0, "--exit-signal-handler": 0, "--log-jsonl": 1,
                  "--tensorboard-dir": 1, "--flexpipe-plans": 1}  # fmt: skip
    kept, words = [], iter(argv[argv.index("pretrain_gpt.py") + 1 :])
    for word in words:
        if word in of_the_job:
            for _ in range(of_the_job[word]):
                next(words)
        else:
            kept.append(word)
    found = runs.run(workers, 1, kept, timeout=300.0)
    pairs = zip(found.losses, found.norms, strict=True)
    return {i: [*loss, norm or 0.0] for i, (loss, norm) in enumerate(pairs, 1)}


TINY = {
    "NUM_LAYERS": "3",
    "HIDDEN_SIZE": "32",
    "NUM_ATTENTION_HEADS": "4",
    "SEQ_LENGTH": "64",
    "MICRO_BATCH_TOKENS": "50",
    "GLOBAL_BATCH_SIZE": "8",
    "SAVE_INTERVAL": "5",
    "WARNING_SECONDS": "60",
}
FLAGS = shlex.split("--num-workers 0 --log-interval 1 --adam-eps 1e-6 --flexpipe-bitwise")
"""Losses do not depend on layouts then: they are compared bit by bit."""
TWO_BY_TWO = "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=2 --time=10"
# Workers 0 and 1 are on one node, 2 and 3 on the other.
PLANS = """\
0:3@0,1 | 3:8@2,3
0:3@2,3 | 3:8@0,1 ; shard 0-7
0:2@0 | 2:4@1 | 4:6@2 | 6:8@3
0:4@3 | 4:8@0,1,2
"""


class Run:
    """The GPT script on two nodes with two workers each, whose layout changes all the time."""

    def __init__(
        self, cluster: slurm.Cluster, data: dict[str, str], directory: Path, iterations: int
    ) -> None:
        self.cluster, self.directory, self.iterations = cluster, directory, iterations
        (directory / "script.txt").write_text(PLANS * (iterations // 4))
        plans = ["--flexpipe-plans", str(directory / "script.txt")]
        variables = TINY | data | {"TRAIN_ITERS": str(iterations)}
        self.job = Batch(
            cluster, directory, GPT, *FLAGS, *plans, flags=TWO_BY_TWO, variables=variables
        )
        self.job.wait_for_iteration(5)
        found = cluster.tasks(self.job.id)
        places = [(task.rank, task.node) for task in found]
        assert places == [(0, "node1"), (1, "node1"), (2, "node2"), (3, "node2")]
        self.argv = found[0].argv

    @property
    def saved(self) -> int:
        """Iteration of the newest checkpoint."""
        found = latest(self.directory / "saved")
        assert found is not None
        return found

    def warn(self) -> None:
        """What Slurm does before the time is up, as ``--signal=B:USR1@...`` asks it to."""
        self.cluster.run("scancel", "--signal=USR1", "--batch", self.job.id)
        self.job.start_again()
        assert f"its time is up; it goes on from iteration {self.saved} " in self.job.text

    def kill_worker(self) -> None:
        """``kill -9`` to a worker."""
        self.job.wait_for_iteration(self.saved + 11)
        os.kill(self.cluster.tasks(self.job.id)[2].pid, signal.SIGKILL)
        said = self.job.wait("the killed task", lambda: "node2: task 2: Killed" in self.job.text)
        assert said < SECONDS
        self.job.start_again()
        words = rf"ended with status \d+; it is started again, from iteration {self.saved}\n"
        assert re.search(words, self.job.text)

    def lose_node(self) -> None:
        """A node is gone, and back after a while."""
        self.job.wait_for_iteration(self.saved + 6)
        self.cluster.kill_node("node2")
        said = self.job.wait("the lost node", lambda: "Node failure on node2" in self.job.text)
        assert said < SECONDS
        self.job.wait("the queue", lambda: self.job.is_("PENDING"))
        self.cluster.start_node("node2")
        self.job.start_again()

    def check(self, workers: WorkerPool) -> None:
        """The job comes to its end, and was never disturbed as far as the losses tell."""
        self.job.wait("the end", lambda: self.job.is_("COMPLETED"))
        assert self.saved == self.iterations
        verify(self.directory / "saved")
        assert self.job.losses == trained_alone(workers, self.argv)
        lines = (self.directory / "log.jsonl").read_text().splitlines()
        plans = {r["plan"] for r in map(json.loads, lines) if r["event"] == "iteration"}
        assert len(plans) == len(PLANS.splitlines())


def test_a_job_on_two_nodes_goes_on_after_its_time_and_a_lost_node(
    cluster: slurm.Cluster, workers: WorkerPool, data: dict[str, str], tmp_path: Path
) -> None:
    run = Run(cluster, data, tmp_path, 60)
    run.warn()
    before = run.saved
    run.lose_node()
    assert f"starting at iteration {before}" in run.job.text
    run.check(workers)


@pytest.mark.soak
def test_a_job_goes_on_after_a_real_time_limit_and_killed_workers(
    cluster: slurm.Cluster, workers: WorkerPool, data: dict[str, str], tmp_path: Path
) -> None:
    run = Run(cluster, data, tmp_path, 4000)
    # The job may run for two minutes; the script's own flag says when before their end.
    cluster.run("scontrol", "update", f"JobId={run.job.id}", "TimeLimit=2")
    run.job.wait("the warning", lambda: "its time is up" in run.job.text, 150.0)
    cluster.run("scontrol", "update", f"JobId={run.job.id}", "TimeLimit=60")
    run.job.start_again()
    for _ in range(3):
        run.kill_worker()
    run.job.wait("the end", lambda: run.job.is_("COMPLETED"), 1200.0)
    run.check(workers)


def test_a_job_that_fails_at_once_is_not_started_again(
    cluster: slurm.Cluster, data: dict[str, str], tmp_path: Path
) -> None:
    flags = "--nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1 --time=10"
    job = Batch(cluster, tmp_path, BERT, "--no-such-flag", flags=flags, variables=TINY | data)
    while not job.is_("FAILED"):
        assert not job.is_("COMPLETED")
        time.sleep(0.05)
    assert "--no-such-flag" in job.text
    assert "nothing was saved since it started: it is not started again" in job.text


def test_bert_is_warned_by_sigterm_and_while_it_starts(
    cluster: slurm.Cluster, data: dict[str, str], tmp_path: Path
) -> None:
    flags = "--nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1 --time=10"
    more = "--num-workers 0 --log-interval 1 --bert-no-binary-head".split()
    variables = TINY | data | {"TRAIN_ITERS": "100000", "PIPELINE_STAGES": "1"}
    job = Batch(cluster, tmp_path, BERT, *more, flags=flags, variables=variables)
    job.wait_for_iteration(3)
    cluster.run("scancel", "--signal=TERM", "--batch", job.id)
    job.wait("the queue", lambda: job.is_("PENDING"))
    saved = latest(tmp_path / "saved")
    assert saved is not None
    assert saved >= 3
    assert f"it goes on from iteration {saved} " in job.text
    for state in ("PENDING", "FAILED"):  # warned while its worker starts; it comes back once
        job.start_again()
        job.wait("the worker", lambda: bool(cluster.tasks(job.id)))
        cluster.run("scancel", "--signal=USR1", "--batch", job.id)
        while not job.is_(state):
            time.sleep(0.05)
        assert latest(tmp_path / "saved") == saved


def test_torchrun_starts_dead_workers_again_from_host_memory_and_ends_when_told(
    cluster: slurm.Cluster, workers: WorkerPool, data: dict[str, str], tmp_path: Path
) -> None:
    flags = "--nodes=2 --gpus-per-node=1 --cpus-per-task=2 --time=10"
    variables = TINY | data | {
        "TRAIN_ITERS": "100000", "SNAPSHOT_INTERVAL": "2", "SAVE_INTERVAL": "100000",
    }  # fmt: skip
    more = [*FLAGS, "--micro-batch-tokens", "50"]
    job = Batch(cluster, tmp_path, TORCHRUN, *more, flags=flags, variables=variables)
    job.wait_for_iteration(6)
    every = cluster.processes(job.id)
    agents = {p.pid: p for p in every if "torch.distributed.run" in p.argv}
    workers_of = (p for p in every if p.parent in agents and p.pid not in agents)
    found = [p for p in workers_of if "pretrain_gpt.py" in p.argv]
    assert sorted(agents[p.parent].node for p in found) == ["node1", "node2"]
    (victim,) = (p for p in found if agents[p.parent].node == "node2")
    os.kill(victim.pid, signal.SIGKILL)
    assert job.wait("the killed worker", lambda: "exitcode: -9" in job.text) < SECONDS
    job.wait("the restart", lambda: "in host memory: starting at iteration" in job.text)
    job.wait_for_iteration(max(job.losses) + 5)
    cluster.run("scancel", "--signal=TERM", job.id)
    job.wait("the end", lambda: job.is_("COMPLETED"))
    assert job.text.count("starting at iteration") == 2
    assert "exiting program after receiving SIGTERM" in job.text
    saved = latest(tmp_path / "saved")
    assert job.losses == trained_alone(workers, [*victim.argv, "--exit-interval", str(saved)])


def test_an_interactive_allocation_runs_a_task_for_each_worker(cluster: slurm.Cluster) -> None:
    seen = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')))"
    words = ["salloc", *TWO_BY_TWO.split(), "bash", "examples/slurm/interactive.sh", "-c", seen]
    text = cluster.run(*words, environment={"VENV": sys.prefix}, cwd=ROOT)
    assert sorted(text.splitlines()) == ["0 0 4", "1 1 4", "2 0 4", "3 1 4"]


def test_the_commands_of_the_documents_are_accepted(cluster: slurm.Cluster) -> None:
    page = (ROOT / "docs" / "slurm.md").read_text()
    lines = [line for block in re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
             for line in block.splitlines()]  # fmt: skip
    lines += re.findall(r"`(sbatch examples/[^`]*)`", (ROOT / "README.md").read_text())
    assert len(lines) >= 7
    for line in lines:
        tried = line.replace("sbatch ", "sbatch --test-only ").replace("$HOME", "/root")
        place = {"VENV": sys.prefix, "PYTHONPATH": str(ROOT)}
        cluster.run("bash", "-c", tried, environment=place, cwd=ROOT)


def test_nothing_is_left_of_a_cluster_whose_tests_are_killed(tmp_path: Path) -> None:
    reason = slurm.missing()
    if reason is not None:
        pytest.skip(reason)
    script = (
        "from tests.end_to_end import slurm; cluster = slurm.Cluster();"
        "cluster.run('sbatch', '--nodes=2', '--ntasks=2', '--wrap', 'srun sleep 1000');"
        "[None for _ in iter(lambda: len(cluster.tasks()), 2)];"
        "print(cluster.directory, flush=True); import time; time.sleep(1000)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE,
                               text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert process.stdout is not None
    directory = Path(process.stdout.readline().strip())
    assert directory.is_dir()
    assert slurm.leftovers(directory)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while slurm.leftovers(directory) or directory.exists():
        assert time.monotonic() < deadline, slurm.leftovers(directory)
        time.sleep(0.05)
