"""A Slurm cluster of the tests' own: munge, slurmctld, and a slurmd for each of two nodes.

All of it runs on this host as this user, on free ports, with its files in a directory of its own.
:mod:`tests.end_to_end.keeper` ends it, also when the tests are killed.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import held_port

NODES = ("node1", "node2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={directory}/munge
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=2
SlurmdTimeout=10
ReturnToService=2
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 Gres=gpu:8
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 Gres=gpu:8
PartitionName=tests Nodes=ALL Default=YES State=UP
"""
# Files stand in for the devices: Slurm complains, counts them and gives them out.
GPUS = "NodeName={nodes[0]},{nodes[1]} Name=gpu File={directory}/gpu[0-7]\n"


def missing() -> str | None:
    """Why there can be no cluster here; ``None`` if there can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"{', '.join(absent)} not found (on Debian: apt install slurm-wlm)" if absent else None


class Cluster:
    """Use it in a ``with`` statement."""

    def __init__(self) -> None:
        # Not in a test's own directory: the path of a socket has 107 characters at most.
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))},
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "SLURM_CONF": str(self.directory / "slurm.conf"),
        }
        self._keeper = subprocess.Popen(
            [sys.executable, "-S", str(Path(__file__).with_name("keeper.py")), str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=self.environment,
        )
        try:
            self._configure()
            files = [f"--{what}-file={self.directory}/munge.{what}"
                     for what in ("key", "pid", "log", "seed")]  # fmt: skip
            self._start("munged", "--foreground", "--force", "--num-threads=2",
                        f"--socket={self.directory}/munge", *files)  # fmt: skip
            self._wait_for("munge", lambda: (self.directory / "munge").is_socket())
            self._start("slurmctld", "-D")
            self.slurmd: dict[str, int] = {}
            for node in NODES:
                self.start_node(node)
            self.wait_for_nodes()
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        user = pwd.getpwuid(os.getuid()).pw_name
        with ExitStack() as stack:
            held = [stack.enter_context(held_port()) for _ in range(3)]
            values: dict[str, Any] = {
                "directory": self.directory,
                "user": user,
                "host": socket.gethostname().partition(".")[0],
                "nodes": NODES,
                "ports": [port.getsockname()[1] for port in held],
            }
        (self.directory / "slurm.conf").write_text(CONFIGURATION.format(**values))
        (self.directory / "gres.conf").write_text(GPUS.format(**values))
        for number in range(8):
            (self.directory / f"gpu{number}").touch()
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.directory / name).mkdir(mode=0o755)
        key = os.open(self.directory / "munge.key", os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(key, "wb") as stream:
            stream.write(os.urandom(128))

    def _start(self, *argv: str) -> int:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        log = str(self.directory / f"{argv[0]}.out")
        print(json.dumps({"argv": argv, "log": log}), file=self._keeper.stdin, flush=True)
        return int(self._keeper.stdout.readline())

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self.slurmd[node] = self._start("slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """As if the node had lost its power: its slurmd and all that it started are gone at once.

        Slurm would take half a minute to believe it; here somebody tells it.
        """
        here = [task for task in self.tasks() if task.node == node]
        for number in {self.slurmd[node], *(t.parent for t in here), *(t.pid for t in here)}:
            os.kill(number, signal.SIGKILL)
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def wait_for_nodes(self, timeout: float = 60.0) -> None:
        """Wait until all nodes take jobs."""

        def ready() -> bool:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%T").split()
            return states == ["idle"] * len(NODES)

        self._wait_for("the nodes", ready, timeout)

    def run(self, *argv: str, environment: Mapping[str, str] | None = None, **options: Any) -> str:
        """What a command of Slurm's prints; a failure if it has failed."""
        done = subprocess.run(
            argv, env={**self.environment, **(environment or {})}, capture_output=True, text=True,
            timeout=60, check=False, **options,
        )  # fmt: skip
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def state(self, job: str) -> str:
        """A job's state, with what is under way (``RUNNING``, ``CANCELLED+COMPLETING``)."""
        text = self.run("scontrol", "--oneliner", "--details", "show", "job", job)
        found = re.search(r"JobState=(\S+)", text)
        assert found is not None, text
        return found[1]

    def processes(self, job: str | None = None) -> list[Process]:
        """What runs of a job, or of all; other clusters may be on this host."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                words = (directory / "environ").read_bytes().decode(errors="replace").split("\0")
                argv = (
                    (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                )
                parent = int((directory / "stat").read_text().rpartition(") ")[2].split()[1])
                above = Path(f"/proc/{parent}/comm").read_text().strip()
            except (OSError, ValueError):
                continue
            values = dict(word.split("=", 1) for word in words if "=" in word)
            ours = values.get("SLURM_CONF", "").startswith(f"{self.directory}/")
            if ours and "SLURM_PROCID" in values and job in (None, values.get("SLURM_JOB_ID")):
                rank, node = int(values["SLURM_PROCID"]), values.get("SLURMD_NODENAME", "")
                is_task = above == "slurmstepd" and "SLURM_STEP_ID" in values
                found.append(Process(int(directory.name), parent, node, rank, is_task, tuple(argv)))
        return found

    def tasks(self, job: str | None = None) -> list[Process]:
        """The tasks of a job, or of all, by rank; not what they started."""
        found = (process for process in self.processes(job) if process.is_task)
        return sorted(found, key=lambda process: process.rank)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        files = sorted(self.directory.glob("*.out")) if self.directory.exists() else []
        return "\n".join(f"{f.name}:\n{f.read_text(errors='replace')[-4000:]}" for f in files)

    def _wait_for(self, what: str, done: Callable[[], bool], timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            assert time.monotonic() < deadline, f"no {what} in {timeout:.0f} s\n{self.logs()}"
            time.sleep(0.05)

    def close(self) -> None:
        """End everything, and remove the directory."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(30)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Process:
    """A process of a job: of its script, its steps' commands, or a task."""

    pid: int
    parent: int
    node: str
    rank: int
    is_task: bool
    argv: tuple[str, ...]


def leftovers(directory: Path) -> list[int]:
    """Processes that know the cluster of this directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SLURM_CONF={directory}/".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
