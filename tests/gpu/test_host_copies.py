"""Host copies of layers from and to a GPU: the arena is pinned, copies run beside other work."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_flex import native
from megatron_flex.twinlayer import manager
from megatron_flex.twinlayer.copies import restore
from megatron_flex.twinlayer.hand_overs import HandOver
from megatron_flex.twinlayer.location import DIRECTORY, socket_of
from megatron_flex.twinlayer.manager import Shape, entry_bytes
from megatron_flex.twinlayer.worker import Member, TwinLayers

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        not native.LIBRARY.exists() or not native.function("mflex_built_with_cuda")(),
        reason="the library was built without CUDA",
    ),
]

NUMEL = (16 << 20) + 3


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A manager with room for two versions of one slab, and two hand-overs."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "runtime"))
    size = entry_bytes(4 * NUMEL)
    path = socket_of(secrets.token_hex(4))
    assert manager.start(path, "test", Shape(2, size, 2 * size), 60.0)
    yield path
    manager.stop(path)


def join(socket: Path, rank: int) -> TwinLayers:
    member = Member(rank, "attempt 0.0", 2, 30.0, 20.0)
    return TwinLayers(socket, member, torch.device("cuda", 0))


def test_a_version_of_a_gpus_state_comes_back_and_the_copy_waits_for_the_work_before_it(
    socket: Path,
) -> None:
    worker = join(socket, 0)
    expected = torch.randn(NUMEL)
    state = torch.zeros(NUMEL, device="cuda")
    big = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):  # keeps the stream busy while the copy is asked for
        big = (big @ big).tanh_()
    state.copy_(expected)
    worker.snapshots.begin(1, {0: state.nbytes}, "{}")
    worker.snapshots.save(0, state).result(60)
    (version,) = worker.versions()
    assert version.entries[0].intact()
    back = torch.zeros(NUMEL, device="cuda")
    restore(version.entries[0], back)
    assert torch.equal(back.cpu(), expected)
    worker.close()


@pytest.mark.parametrize(("source", "target"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_a_hand_over_brings_the_same_bits(socket: Path, source: str, target: str) -> None:
    writer, reader = join(socket, 0), join(socket, 1)
    for serial in range(1, 6):
        state = torch.randn(NUMEL).to(source)
        got = torch.zeros(NUMEL, device=target)
        for one in (writer, reader):
            one.hand_overs.reserve(serial, [HandOver(0, 3, state.nbytes, 1)])
        entries = writer.hand_overs.entry(0, 3), reader.hand_overs.entry(0, 3)
        assert entries[0] is not None
        assert entries[1] is not None
        read = reader.hand_overs.read(entries[1], got)
        writer.hand_overs.write(entries[0], state).result(60)
        read.result(60)
        assert torch.equal(got.cpu(), state.cpu())
    for one in (writer, reader):
        one.close()
