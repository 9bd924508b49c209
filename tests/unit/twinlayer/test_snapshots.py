"""Versions for recovery: what is kept, what may be overwritten, and what is noticed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex import native
from megatron_flex.twinlayer.copies import restore
from megatron_flex.twinlayer.errors import TwinError
from megatron_flex.twinlayer.manager import Shape, entry_bytes
from megatron_flex.twinlayer.worker import TwinLayers
from tests.unit.twinlayer.managers import join, manager, running, status

SIZES = (300_000, 0, 65_536, 7_000)  # elements
BANK = sum(entry_bytes(4 * size) for size in SIZES)


def states(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


def write(
    worker: TwinLayers, version: int, slabs: Sequence[int] = range(len(SIZES)),
    common: str | None = '{"iteration": "x"}',
) -> None:  # fmt: skip
    """Write slabs of a version, whose values follow from its number."""
    listed = states(version)
    worker.snapshots.begin(version, {s: listed[s].nbytes for s in slabs}, common)
    for future in [worker.snapshots.save(s, listed[s]) for s in slabs]:
        future.result(10)


def numbers(worker: TwinLayers) -> list[int]:
    return [version.number for version in worker.versions()]


def test_what_was_kept_comes_back_bit_for_bit() -> None:
    with manager(Shape(2, BANK, 0)) as socket:
        worker = join(socket)
        write(worker, 7)
        worker.close()
        (version,) = join(socket, attempt="attempt 1.0").versions()
        assert version.number == 7
        assert version.common == {"iteration": "x"}
        for slab, expected in enumerate(states(7)):
            entry = version.entries[slab]
            assert entry.intact()
            state = torch.zeros_like(expected)
            restore(entry, state)
            assert torch.equal(state, expected)


def test_a_slab_without_state_is_complete_without_a_copy() -> None:
    with manager(Shape(2, BANK, 0)) as socket:
        worker = join(socket)
        worker.snapshots.begin(5, {s: 4 * size for s, size in enumerate(SIZES)}, "{}")
        for slab in (0, 2, 3):
            worker.snapshots.save(slab, states(5)[slab]).result(10)
        (version,) = worker.versions()
        assert sorted(version.entries) == [0, 1, 2, 3]
        assert version.entries[1].intact()
        worker.close()


def test_workers_write_their_shares_of_one_version() -> None:
    with manager(Shape(2, BANK, 0)) as socket:
        first, second = join(socket, 0), join(socket, 1)
        write(first, 3, [0, 2])
        assert sorted(first.versions()[0].entries) == [0, 2]
        write(second, 3, [1, 3], common=None)
        (version,) = first.versions()
        assert sorted(version.entries) == [0, 1, 2, 3]
        assert version.common is not None
        first.close()
        second.close()


def test_a_version_is_overwritten_only_when_a_newer_one_is_complete_everywhere() -> None:
    with manager(Shape(2, BANK, 0)) as socket:
        worker = join(socket)
        write(worker, 2)
        write(worker, 4)
        with pytest.raises(TwinError, match=r"no bank for version 6: the versions kept are 2, 4"):
            write(worker, 6)
        assert numbers(worker) == [4, 2]
        worker.arena.commit(2)
        with pytest.raises(TwinError, match="that is complete on all servers is 2"):
            write(worker, 6)
        worker.arena.commit(4)
        worker.arena.commit(2)  # a worker that is late with it changes nothing
        write(worker, 6)
        assert numbers(worker) == [6, 4]
        assert torch.equal(worker.versions()[1].entries[0].data.view(torch.float32), states(4)[0])
        worker.close()


def test_adopting_a_version_forgets_the_others() -> None:
    with manager(Shape(3, BANK, 0)) as socket:
        worker = join(socket)
        for version in (1, 2, 3):
            write(worker, version)
        worker.adopt(2)
        assert numbers(worker) == [2]
        write(worker, 3)
        write(worker, 4)
        assert numbers(worker) == [4, 3, 2]
        worker.adopt(0)
        assert numbers(worker) == []
        worker.close()


def test_a_slab_that_was_not_finished_is_not_there() -> None:
    with manager(Shape(2, BANK, 0)) as socket:
        worker = join(socket)
        listed = states(1)
        worker.snapshots.begin(1, {0: listed[0].nbytes, 2: listed[2].nbytes})
        worker.snapshots.save(2, listed[2]).result(10)
        worker.close()
        (version,) = join(socket, attempt="attempt 1.0").versions()
        assert sorted(version.entries) == [2]
        assert version.common is None


def test_an_exhausted_bank_names_slab_and_bytes_and_changes_nothing() -> None:
    with manager(Shape(2, BANK - 4096, 0)) as socket:
        worker = join(socket)
        write(worker, 1, [0])
        with pytest.raises(TwinError, match=r"the arena is exhausted: slab 3 of version 2 takes"):
            write(worker, 2)
        assert numbers(worker) == [1]
        with pytest.raises(TwinError, match="slab 0 of version 1 has a writer already"):
            write(worker, 1, [0])
        worker.close()


@pytest.mark.parametrize("byte", [0, 700_001, 1_199_999])
def test_a_flipped_bit_is_noticed(byte: int) -> None:
    with manager(Shape(2, BANK, 0)) as socket:
        worker = join(socket)
        write(worker, 1)
        (version,) = worker.versions()
        assert version.entries[0].intact()
        version.entries[0].data[byte] ^= 4
        assert not version.entries[0].intact()
        assert version.entries[2].intact()
        worker.close()


def test_without_its_manager_nothing_is_written_and_nothing_fails() -> None:
    with manager(Shape(2, BANK, 0)) as socket:
        worker = join(socket)
        pid = status(socket)["pid"]
        write(worker, 1)
        assert status(socket)["snapshots"] == 1
        os.kill(pid, signal.SIGKILL)
        while running(pid):
            pass
        write(worker, 2)
        assert worker.lost
        write(worker, 3)
        worker.end()
        worker.close()


@given(st.binary(max_size=3000), st.integers(1, 700))
def test_the_checksum_is_xxh64_of_chunks_seeded_with_those_before(data: bytes, chunk: int) -> None:
    expected = 0
    for start in range(0, len(data), chunk):
        expected = xxhash.xxh64_intdigest(data[start : start + chunk], seed=expected)
    source = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[: len(data)]
    checksum = native.function("mflex_twin_checksum")
    assert checksum(source.data_ptr(), len(data), chunk) == expected
    target = torch.zeros(len(data), dtype=torch.uint8)
    flags = torch.zeros(len(data) + 1, dtype=torch.int64)
    save = native.function("mflex_twin_save")
    addresses = source.data_ptr(), target.data_ptr()
    assert save(*addresses, len(data), chunk, flags.data_ptr(), 9) == expected
    assert torch.equal(target, source)
    chunks = -(-len(data) // chunk)
    assert flags.tolist() == [9] * chunks + [0] * (len(flags) - chunks)
