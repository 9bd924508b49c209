"""Whose turn it is to copy, as the manager gives it. Its order alone: kernels/test/turns.cpp."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_flex.twinlayer.hand_overs import HandOver
from megatron_flex.twinlayer.manager import AT_ONCE, Shape, entry_bytes
from megatron_flex.twinlayer.turns import Turns
from tests.unit.twinlayer.managers import join, manager, running, status

SMALL = Shape(0, 0, 1 << 20)


class Copier(threading.Thread):
    """A thread that takes a turn, says so, and keeps it until it is let go."""

    def __init__(self, socket: Path, slab: int, *, background: bool = False) -> None:
        super().__init__(daemon=True)
        self.turns = Turns(socket, 20.0)
        self.slab, self.background = slab, background
        self.copies, self.release = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self.turns.turn(self.slab, 1000 + self.slab, background=self.background):
            self.copies.set()
            self.release.wait(20.0)
        self.turns.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


def test_two_copy_at_a_time_and_the_most_urgent_comes_next() -> None:
    with manager(SMALL) as socket:
        first = [Copier(socket, slab) for slab in (8, 9)]
        until(lambda: all(one.copies.is_set() for one in first))
        later = [Copier(socket, 1, background=True), Copier(socket, 5), Copier(socket, 2)]
        until(lambda: status(socket)["waiting"] == len(later))
        found = status(socket)
        assert found["copying"] == AT_ONCE == 2
        assert found["bytes_under_way"] == 2017
        assert found["workers"] == []  # waiting for a turn keeps no manager alive
        order = [later[2], later[1], later[0]]
        for done, following in zip([*first, *order[:1]], order, strict=True):
            done.release.set()
            until(following.copies.is_set)
            assert sum(one.copies.is_set() for one in later) == 1 + order.index(following)
        for one in order:
            one.release.set()
        until(lambda: status(socket)["copying"] == 0)


def test_a_hand_over_waits_for_its_turn() -> None:
    numel = 1000
    with manager(Shape(0, 0, entry_bytes(4 * numel))) as socket:
        first = [Copier(socket, slab) for slab in (8, 9)]
        until(lambda: all(one.copies.is_set() for one in first))
        worker = join(socket, 0)
        worker.hand_overs.reserve(1, [HandOver(0, 5, 4 * numel, 1)])
        entry = worker.hand_overs.entry(0, 5)
        assert entry is not None
        written = worker.hand_overs.write(entry, torch.ones(numel))
        until(lambda: written.done() or status(socket)["waiting"] == 1)
        assert not written.done(), "it was written while two others copied"
        assert not entry.data.view(torch.float32).any()
        first[0].release.set()
        written.result(10)
        assert (entry.data.view(torch.float32)[:numel] == 1).all()
        first[1].release.set()


def test_the_turn_of_a_process_that_ends_goes_to_the_next() -> None:
    with manager(SMALL) as socket:
        first = [Copier(socket, slab) for slab in (8, 9)]
        until(lambda: all(one.copies.is_set() for one in first))
        gone, next_ = Copier(socket, 1), Copier(socket, 2)
        until(lambda: status(socket)["waiting"] == 2)
        for one in (gone, first[0]):  # as the kernel does when a process is killed
            assert one.turns._client is not None
            one.turns._client._socket.shutdown(2)
        until(next_.copies.is_set)
        for one in (*first, gone, next_):
            one.release.set()
        until(lambda: status(socket)["copying"] == 0)


def test_whoever_waits_goes_on_when_the_manager_is_killed() -> None:
    with manager(SMALL) as socket:
        first = [Copier(socket, slab) for slab in (8, 9)]
        until(lambda: all(one.copies.is_set() for one in first))
        waits = Copier(socket, 1)
        until(lambda: status(socket)["waiting"] == 1)
        pid = status(socket)["pid"]
        os.kill(pid, signal.SIGKILL)
        until(waits.copies.is_set)
        assert waits.turns.lost
        until(lambda: not running(pid))
        for one in (*first, waits):
            one.release.set()
        with Turns(socket, 1.0).turn(0, 1):
            pass


@pytest.mark.parametrize("kill", [False, True])
def test_many_transfers_at_once_bring_the_right_bytes_and_never_too_many_copy(kill: bool) -> None:
    """Six workers hand slabs of random sizes to one another and keep versions, all at once."""
    size, rounds, rng = 6, 8, random.Random(5)
    numel = [rng.randrange(1, 400_000) for _ in range(size)]
    versions = Shape(3, sum(entry_bytes(4 * n) for n in numel), 1 << 24)
    with manager(versions) as socket:
        workers = [join(socket, rank) for rank in range(size)]
        most, stop = [0], threading.Event()

        def watch() -> None:
            while not stop.wait(0.001):
                if not kill:
                    most[0] = max(most[0], status(socket)["copying"])

        watcher = threading.Thread(target=watch)
        watcher.start()
        for serial in range(1, rounds + 1):
            states = [torch.full((n,), float(10 * serial + r)) for r, n in enumerate(numel)]
            pairs = [(rank, (rank + 1 + serial % (size - 1)) % size) for rank in range(size)]
            for rank, worker in enumerate(workers):
                mine = [source for source, target in pairs if rank in (source, target)]
                worker.hand_overs.reserve(
                    serial, [HandOver(source, source, 4 * numel[source], 1) for source in mine]
                )
            if not all(worker.hand_overs.reserved() for worker in workers):
                break  # the manager is gone
            futures, got = [], [torch.zeros(n) for n in numel]
            for source, target in pairs:
                entry = workers[target].hand_overs.entry(source, source)
                assert entry is not None
                futures.append(workers[target].hand_overs.read(entry, got[source]))
            if kill and serial == rounds // 2:
                os.kill(status(socket)["pid"], signal.SIGKILL)
            for source, _ in pairs:
                worker, state = workers[source], states[source]
                worker.snapshots.begin(serial, {source: state.nbytes}, None)
                entry = worker.hand_overs.entry(source, source)
                assert entry is not None
                futures += [worker.snapshots.save(source, state),
                            worker.hand_overs.write(entry, state)]  # fmt: skip
            for future in futures:
                future.result(20.0)
            assert all(torch.equal(a, b) for a, b in zip(got, states, strict=True))
            workers[0].arena.commit(serial)
        assert serial == (rounds // 2 + 1 if kill else rounds)
        stop.set()
        watcher.join()
        assert most[0] <= AT_ONCE
        for worker in workers:
            worker.close()
