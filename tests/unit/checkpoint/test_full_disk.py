"""A disk that is full or read-only: really, through a limit of the system or a small disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_flex.checkpoint import layout
from megatron_flex.checkpoint.async_save import AsyncSaver
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.load import load
from megatron_flex.checkpoint.save import save
from tests.unit.disk import file_size_limit

ROOT = Path(__file__).resolve().parents[3]

# Runs in a name space of its own, where mounting a disk of 2 MiB needs no privilege. It fills the
# disk at each possible place of a save: a checkpoint of this size needs about 1.1 MiB.
SMALL_DISK = """
import os, sys
import torch
from pathlib import Path
from megatron_flex.checkpoint import layout
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.load import load
from megatron_flex.checkpoint.save import check_writable, save

directory = Path(sys.argv[1])
tensors = lambda i: {f"w{n}": torch.full((64, 1024), float(i)) for n in range(4)}
save(directory, 1, tensors(1), {"iteration": 1}, group=None)
filler = directory.parent / "filler"
failures = set()
for free in (*range(0, 1020, 60), *range(1020, 1200, 4)):  # KiB
    disk = os.statvfs(directory)
    with open(filler, "wb") as file:
        file.write(bytes(max(0, disk.f_bavail * disk.f_frsize - free * 1024)))
    before = sorted(p.name for p in directory.iterdir())
    try:
        save(directory, 2, tensors(2), {"iteration": 2}, group=None)
    except CheckpointError as error:
        assert "the disk is full" in str(error), error
        failures.add(str(error).split(":")[0])
        assert sorted(p.name for p in directory.iterdir()) == before, "something was left behind"
    else:
        break
    finally:
        filler.unlink()
    assert layout.latest(directory) == 1
    target = tensors(0)
    assert load(directory, target, group=None) == {"iteration": 1}
    assert all(torch.equal(target[n], t) for n, t in tensors(1).items())
target = tensors(0)
assert load(directory, target, group=None) == {"iteration": 2}
assert all(torch.equal(target[n], t) for n, t in tensors(2).items())
assert len(failures) == 2, failures  # while writing the tensors, and while naming the result
os.system(f"mount -o remount,ro {directory.parent}")
for attempt in (lambda: check_writable(directory, group=None),
                lambda: save(directory, 3, {}, {}, group=None)):
    try:
        attempt()
    except CheckpointError as error:
        assert "read-only: save elsewhere" in str(error), error
    else:
        raise AssertionError("saved on a read-only disk")
assert load(directory, target, group=None) == {"iteration": 2}
print("passed")
"""


def _tensors(iteration: int) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((64, 1024), float(iteration)) for n in range(4)}


@pytest.mark.parametrize("size", [0, 100, 100_000, 1_000_000])
def test_a_write_that_fails_part_way_leaves_the_previous_checkpoint(
    tmp_path: Path, size: int
) -> None:
    save(tmp_path, 1, _tensors(1), {"iteration": 1}, group=None)
    names = sorted(os.listdir(tmp_path))
    with file_size_limit(size), pytest.raises(CheckpointError, match="limit is reached"):
        save(tmp_path, 2, _tensors(2), {"iteration": 2}, group=None)
    assert sorted(os.listdir(tmp_path)) == names
    target = _tensors(0)
    assert load(tmp_path, target, group=None) == {"iteration": 1}
    assert torch.equal(target["w3"], _tensors(1)["w3"])
    save(tmp_path, 2, _tensors(2), {"iteration": 2}, group=None)
    assert layout.latest(tmp_path) == 2


def test_an_asynchronous_save_that_fails_raises_later_and_the_next_succeeds(tmp_path: Path) -> None:
    saver = AsyncSaver(tmp_path, group=None)
    with file_size_limit(1000):
        saver.start(1, _tensors(1), {})
        while saver.running:
            time.sleep(0.01)
    assert saver.failed
    with pytest.raises(CheckpointError, match="limit is reached"):
        saver.start(2, _tensors(2), {})
    assert os.listdir(tmp_path) == [".checkpoint.lock"]
    saver.start(3, _tensors(3), {})
    saver.close()
    assert layout.latest(tmp_path) == 3


def test_a_disk_that_fills_up_at_any_moment_of_a_save_loses_nothing(tmp_path: Path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = 'mount -t tmpfs -o size=2400k none "$0"'
    try:
        able = subprocess.run([*unshare, "sh", "-c", mount, tmp_path], capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the command unshare")
    if able.returncode:
        pytest.skip(f"this system lets no user mount a disk: {able.stderr.decode().strip()}")
    result = subprocess.run(
        [*unshare, "sh", "-c", f'{mount} && exec "$1" -c "$2" "$0/save"', tmp_path,
         sys.executable, SMALL_DISK],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.endswith("passed\n")
