"""The manager's life: memory, socket, and when it ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from megatron_flex.twinlayer import location
from megatron_flex.twinlayer.__main__ import main
from megatron_flex.twinlayer.client import Client, status_of
from megatron_flex.twinlayer.errors import ManagerLost, TwinError
from megatron_flex.twinlayer.location import job_name, runtime_directory, socket_of, sockets
from megatron_flex.twinlayer.manager import PROGRAM, Shape, start, stop
from tests.unit.twinlayer.managers import JOB, join, manager, running, status, wait_until_gone

SMALL = Shape(2, 1 << 20, 1 << 20)


def test_it_reserves_its_memory_and_lives_in_a_session_of_its_own() -> None:
    with manager(Shape(2, 5 << 20, 3 << 20)) as socket:
        found = status(socket)
        assert found["bytes"] == Shape(2, 5 << 20, 3 << 20).bytes == 4096 + (13 << 20)
        fields = Path(f"/proc/{found['pid']}/status").read_text().split("\n")
        shared = next(int(f.split()[1]) for f in fields if f.startswith("RssShmem"))
        assert shared * 1024 >= found["bytes"]
        assert os.getsid(found["pid"]) == found["pid"]
        assert os.getpgid(found["pid"]) != os.getpgid(0)
        assert os.readlink(f"/proc/{found['pid']}/cwd") == "/"


def test_socket_and_directory_are_closed_to_others(runtime: Path) -> None:
    with manager(SMALL) as socket:
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(runtime_directory().stat().st_mode) == 0o700
    runtime.chmod(0o755)
    with pytest.raises(TwinError, match="with mode 0700: remove it, or set MEGATRON_FLEX_RUNTIME"):
        runtime_directory()


def test_a_second_start_finds_the_first_manager() -> None:
    with manager(SMALL) as socket:
        pid = status(socket)["pid"]
        assert not start(socket, JOB, SMALL)
        assert status(socket)["pid"] == pid


def test_jobs_are_told_apart_by_run_and_meeting_point() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
    names = [
        job_name(torchrun),
        job_name(torchrun | {"MASTER_PORT": "29501"}),
        job_name(torchrun | {"TORCHELASTIC_RUN_ID": "other"}),
        job_name({"SLURM_JOB_ID": "7", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}),
    ]
    assert names[0] == "none at node7:29500"
    assert len({socket_of(str(name)) for name in names}) == 4
    assert job_name({}) is None


def test_it_ends_when_the_job_has_ended_well() -> None:
    with manager(SMALL) as socket:
        pid = status(socket)["pid"]
        worker = join(socket)
        worker.end()
        wait_until_gone(pid, socket)
        with pytest.raises(ManagerLost, match="has ended"):
            worker.adopt(0)
        worker.close()


def test_it_waits_for_workers_to_come_back_and_then_ends() -> None:
    with manager(SMALL) as socket:
        pid = status(socket)["pid"]
        join(socket, linger=60.0).close()
        worker = join(socket, linger=60.0)  # came back in time
        assert status(socket)["workers"] == [0]
        worker.close()
        join(socket, linger=0.2).close()
        wait_until_gone(pid, socket)


def test_it_ends_when_no_worker_ever_comes() -> None:
    with manager(SMALL, patience=1.5) as socket:
        wait_until_gone(status(socket)["pid"], socket)


def test_it_stays_while_a_worker_is_there() -> None:
    for linger in (0.5, 4.0, 32.0):  # the longer ones for a machine that is too busy
        with manager(SMALL, patience=4 * linger) as socket:
            try:
                join(socket, linger=linger).close()
                worker = join(socket, linger=0.1)
            except ManagerLost:
                continue
            ends = time.monotonic() + 4.2 * linger
            while time.monotonic() < ends:
                assert status(socket)["workers"] == [0]
                time.sleep(0.05)
            worker.close()
            return
    pytest.fail("no worker came back within 32 s")


def test_a_terminated_manager_takes_its_socket_along() -> None:
    with manager(SMALL) as socket:
        pid = status(socket)["pid"]
        os.kill(pid, signal.SIGTERM)
        wait_until_gone(pid, socket)


def test_the_socket_of_a_killed_manager_is_cleared_away_by_the_next(runtime: Path) -> None:
    with manager(SMALL) as socket:
        pid = status(socket)["pid"]
        os.kill(pid, signal.SIGKILL)
        while running(pid):
            time.sleep(0.01)
        assert socket.exists()
        assert status_of(socket) is None
        assert not stop(socket)
        with manager(SMALL, "another at localhost:1") as other:
            assert sockets() == [other]


def test_too_large_a_reservation_names_the_bytes_and_the_limit() -> None:
    with pytest.raises(TwinError, match=r"take 2000000000004096 bytes of memory, but only \d+ are"):
        start(socket_of(JOB), JOB, Shape(2, 10**15, 0))
    assert sockets() == []


def test_a_missing_program_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_flex.twinlayer.manager.PROGRAM", Path("/nowhere/twin_manager"))
    with pytest.raises(TwinError, match=r"is missing: run `make native`"):
        start(socket_of(JOB), JOB, SMALL)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {}, (8 << 30, "on this machine (MemAvailable)")),
        (
            "0::/jobs/7\n",
            {
                "jobs/7/memory.max": "max",
                "jobs/7/memory.current": "100",
                "jobs/memory.max": str(3 << 30),
                "jobs/memory.current": str(1 << 30),
                "jobs/memory.stat": f"anon 5\ninactive_file {1 << 29}\n",
            },
            ((2 << 30) + (1 << 29), "in the cgroup /jobs"),
        ),
        (  # in a container the path is that of the host, and what is mounted is its own group
            "0::/docker/abc\n",
            {"memory.max": str(1 << 30), "memory.current": str(1 << 28)},
            (3 << 28, "in the cgroup /"),
        ),
        (
            "4:cpu,memory:/slurm/job_1\n2:cpuset:/\n",
            {
                "memory/slurm/job_1/memory.limit_in_bytes": str(2 << 30),
                "memory/slurm/job_1/memory.usage_in_bytes": str(3 << 30),
                "memory/memory.limit_in_bytes": str((1 << 63) - 4096),
                "memory/memory.usage_in_bytes": str(1 << 30),
            },
            (0, "in the cgroup /slurm/job_1"),
        ),
    ],
)
def test_the_smallest_limit_of_machine_and_cgroups_counts(
    tmp_path: Path, groups: str, files: dict[str, str], expected: tuple[int, str]
) -> None:
    root = tmp_path / "root"
    listed = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {8 << 20} kB\n"}
    listed["proc/self/cgroup"] = groups
    listed.update({f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    for name, text in listed.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [str(PROGRAM), "--available", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, _, where = done.stdout.strip().partition(" ")
    assert (int(size), where) == expected


def test_status_says_what_each_manager_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "no manager of host copies runs on this server\n"
    assert main(["start", "--job", JOB, "--bank-gb", "0.001", "--room-gb", "0.002"]) == 0
    assert main(["start", "--job", JOB]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [f"started: {JOB}", f"there is one already: {JOB}"]
    with_worker = join(socket_of(JOB), rank=5)
    assert main(["status"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{JOB}: process ")
    assert "workers: 5" in text
    assert "2 versions of up to 1.0 MB" in text
    with_worker.close()
    assert main(["stop", "--job", JOB]) == 0
    assert main(["stop", "--job", JOB]) == 1
    assert f"no manager runs for '{JOB}'" in capsys.readouterr().err


def test_requests_that_make_no_sense_are_refused_and_leave_the_manager_alive() -> None:
    with manager(SMALL) as socket:
        stranger = Client(socket)
        with pytest.raises(TwinError, match="say HELLO first"):
            stranger.request("LIST")
        stranger.hello("attempt 0.0", 0, 1.0)
        for words, why in (
            ("NONSENSE", "no request 'NONSENSE'"),
            ("BEGIN", "needs 1 numbers"),
            ("BEGIN x", "'x' is not a number"),
            ("BEGIN 0", "versions are above 0"),
            ("COMMON 1", "needs a body"),
            ("HANDOVER 99999999999999999999", "is not a number"),
        ):
            with pytest.raises(TwinError, match=why):
                stranger.request(words)
        assert status(socket)["workers"] == [0]
        stranger.close()


def test_a_manager_that_hangs_is_given_up() -> None:
    with manager(SMALL) as socket:
        pid = status(socket)["pid"]
        client = Client(socket, timeout=0.3)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(ManagerLost, match=r"did not answer STATUS within 0 s"):
                client.request("STATUS")
            # Its late answer must not be taken for another's.
            with pytest.raises(ManagerLost):
                client.request("STATUS")
        finally:
            os.kill(pid, signal.SIGCONT)


def test_its_end_is_seen_without_asking() -> None:
    with manager(SMALL) as socket:
        pid = status(socket)["pid"]
        worker = join(socket)
        before = worker.lost
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while not (now := worker.lost) and time.monotonic() < deadline:
            time.sleep(0.01)
        worker.close()
    assert (before, now) == (False, True)


def test_another_users_directory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv(location.DIRECTORY, str(tmp_path / "link"))
    with pytest.raises(TwinError, match="directory of this user's own"):
        runtime_directory()
