"""Slabs from worker to worker through the arena."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch

from megatron_flex import native
from megatron_flex.twinlayer.errors import TwinError
from megatron_flex.twinlayer.hand_overs import HandOver
from megatron_flex.twinlayer.manager import Shape, entry_bytes
from megatron_flex.twinlayer.worker import TwinLayers
from tests.unit.twinlayer.managers import join, manager, running, status

NUMEL = 500_000
BYTES = 4 * NUMEL
ROOM = Shape(0, 0, 3 * entry_bytes(BYTES))


def slab(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def pass_on(
    serial: int, writer: TwinLayers, readers: list[TwinLayers], wanted: HandOver
) -> list[torch.Tensor]:
    """Reserve, read and write one hand-over; what the readers got."""
    for one in (*readers, writer):
        one.hand_overs.reserve(serial, [wanted])
    got = [torch.zeros(NUMEL) for _ in readers]
    reads = []
    for reader, state in zip(readers, got, strict=True):
        entry = reader.hand_overs.entry(wanted.source, wanted.slab)
        assert entry is not None
        reads.append(reader.hand_overs.read(entry, state))
    entry = writer.hand_overs.entry(wanted.source, wanted.slab)
    assert entry is not None
    writer.hand_overs.write(entry, slab(serial)).result(10)
    for read in reads:
        read.result(10)
    return got


def test_one_copy_serves_all_readers_and_its_room_comes_back() -> None:
    with manager(ROOM) as socket:
        writer, *readers = [join(socket, rank) for rank in range(3)]
        for serial in range(1, 8):  # more than the room holds at once
            for got in pass_on(serial, writer, readers, HandOver(0, 5, BYTES, 2)):
                assert torch.equal(got, slab(serial))
        found = status(socket)
        assert found["handed_over"] == 7
        assert found["without_room"] == 0
        assert found["room_used"] <= entry_bytes(BYTES)


def test_a_reader_starts_after_the_first_chunk() -> None:
    with manager(ROOM) as socket:
        writer, reader = join(socket, 0), join(socket, 1)
        wanted = HandOver(0, 5, BYTES, 1)
        for one in (writer, reader):
            one.hand_overs.reserve(1, [wanted])
        place, entry = writer.hand_overs.entry(0, 5), reader.hand_overs.entry(0, 5)
        assert place is not None
        assert entry is not None
        source, got = slab(1), torch.zeros(NUMEL)
        read = reader.hand_overs.read(entry, got)
        chunk = place.chunk_bytes // 4
        assert 3 * chunk < NUMEL
        place.data.view(torch.float32)[:chunk] = source[:chunk]
        place.flags[0] = place.version
        deadline = time.monotonic() + 10
        while not torch.equal(got[:chunk], source[:chunk]):
            assert time.monotonic() < deadline, "the first chunk was not read"
        assert not read.done()
        writer.hand_overs.write(place, source).result(10)
        read.result(10)
        assert torch.equal(got, source)


def test_chunks_are_larger_where_several_transfers_are_under_way() -> None:
    with manager(Shape(0, 0, 16 * entry_bytes(BYTES))) as socket:
        writer = join(socket, 0)
        chunks = []
        for serial in (1, 2):  # what the first switch placed is written before the second
            listed = [HandOver(0, number, BYTES, 1) for number in range(4)]
            writer.hand_overs.reserve(serial, listed)
            for one in listed:
                entry = writer.hand_overs.entry(0, one.slab)
                assert entry is not None
                chunks.append(entry.chunk_bytes)
                writer.hand_overs.write(entry, slab(serial)).result(10)
        assert chunks[:4] == chunks[4:] == sorted(chunks[:4])
        assert chunks[3] >= 2 * chunks[0]
        assert chunks[3] <= 1 << 20


def test_what_has_no_room_is_said_to_both_ends_alike() -> None:
    with manager(Shape(0, 0, entry_bytes(BYTES))) as socket:
        writer, reader = join(socket, 0), join(socket, 1)
        wanted = [HandOver(0, 1, BYTES, 1), HandOver(0, 2, BYTES, 1), HandOver(0, 3, 4096, 1)]
        writer.hand_overs.reserve(1, wanted[:2])
        assert writer.hand_overs.reserved()  # so that the writer was first
        reader.hand_overs.reserve(1, wanted[::-1])
        assert reader.hand_overs.reserved()
        for one in (writer, reader):
            assert one.hand_overs.entry(0, 1) is not None
            assert one.hand_overs.entry(0, 2) is None
        assert status(socket)["without_room"] == 2


def test_what_nobody_reads_is_taken_back_three_switches_later() -> None:
    with manager(Shape(0, 0, entry_bytes(BYTES))) as socket:
        writer = join(socket, 0)
        places = []
        for serial in range(1, 5):
            writer.hand_overs.reserve(serial, [HandOver(0, serial, BYTES, 1)])
            places.append(writer.hand_overs.entry(0, serial) is not None)
        assert places == [True, False, False, True]


def test_workers_that_disagree_are_told() -> None:
    with manager(ROOM) as socket:
        writer, reader = join(socket, 0), join(socket, 1)
        writer.hand_overs.reserve(1, [HandOver(0, 1, BYTES, 1)])
        assert writer.hand_overs.reserved()
        reader.hand_overs.reserve(1, [HandOver(0, 1, BYTES + 4096, 1)])
        with pytest.raises(TwinError, match="workers disagree about slab 1 of switch 1"):
            reader.hand_overs.reserved()


def test_a_reader_learns_at_once_that_the_writer_has_ended() -> None:
    with manager(ROOM) as socket:
        writer, reader = join(socket, 0), join(socket, 1)
        for one in (writer, reader):
            one.hand_overs.reserve(1, [HandOver(0, 5, BYTES, 1)])
            assert one.hand_overs.reserved()
        entry = reader.hand_overs.entry(0, 5)
        assert entry is not None
        read = reader.hand_overs.read(entry, torch.zeros(NUMEL))
        assert not read.done()
        writer.close()  # as the kernel does when the process is killed
        with pytest.raises(TwinError, match="worker 0 ended before it had handed over slab 5"):
            read.result(5)


def test_the_end_of_an_earlier_attempts_worker_does_not_touch_this_ones() -> None:
    with manager(ROOM) as socket:
        old = join(socket, 0)
        writer, reader = (join(socket, rank, attempt="attempt 1.0") for rank in range(2))
        for one in (writer, reader):
            one.hand_overs.reserve(1, [HandOver(0, 5, BYTES, 1)])
            assert one.hand_overs.reserved()
        old.close()
        assert status(socket)["workers"] == [0, 1]
        place, entry = writer.hand_overs.entry(0, 5), reader.hand_overs.entry(0, 5)
        assert place is not None
        assert entry is not None
        got = torch.zeros(NUMEL)
        read = reader.hand_overs.read(entry, got)
        writer.hand_overs.write(place, slab(1)).result(10)
        read.result(10)
        assert torch.equal(got, slab(1))


def test_a_wait_that_is_too_long_names_slab_and_chunk() -> None:
    with manager(ROOM) as socket:
        reader = join(socket, 1, timeout=0.2)
        reader.hand_overs.reserve(1, [HandOver(0, 5, BYTES, 1)])
        entry = reader.hand_overs.entry(0, 5)
        assert entry is not None
        read = reader.hand_overs.read(entry, torch.zeros(NUMEL))
        with pytest.raises(TwinError, match=r"slab 5 of worker 0: chunk 0 of \d+ .* within 0.2 s"):
            read.result(10)


def test_a_wait_for_a_chunk_of_a_gpu_ends_by_the_clock() -> None:
    flag, began = torch.zeros(1, dtype=torch.int64), time.perf_counter()
    assert native.function("mflex_twin_wait")(flag.data_ptr(), 1, 300_000_000) == 0
    assert 0.3 <= time.perf_counter() - began < 0.9


def test_a_transfer_that_has_its_place_outlives_the_manager() -> None:
    with manager(ROOM) as socket:
        writer, reader = join(socket, 0), join(socket, 1)
        for one in (writer, reader):
            one.hand_overs.reserve(1, [HandOver(0, 5, BYTES, 1)])
            assert one.hand_overs.reserved()
        pid = status(socket)["pid"]
        os.kill(pid, signal.SIGKILL)
        while running(pid):
            pass
        place, entry = writer.hand_overs.entry(0, 5), reader.hand_overs.entry(0, 5)
        assert place is not None
        assert entry is not None
        got = torch.zeros(NUMEL)
        read = reader.hand_overs.read(entry, got)
        writer.hand_overs.write(place, slab(1)).result(10)
        read.result(10)
        assert torch.equal(got, slab(1))
        writer.hand_overs.reserve(2, [HandOver(0, 5, BYTES, 1)])
        assert not writer.hand_overs.reserved()


def test_random_switches_never_mix_two_slabs() -> None:
    rng = random.Random(3)
    with manager(ROOM) as socket:
        workers = [join(socket, rank) for rank in range(3)]
        for serial in range(1, 15):
            source = rng.randrange(3)
            others = [w for r, w in enumerate(workers) if r != source]
            readers = rng.sample(others, rng.randint(1, 2))
            wanted = HandOver(source, rng.randrange(9), BYTES, len(readers))
            for got in pass_on(serial, workers[source], readers, wanted):
                assert torch.equal(got, slab(serial))
