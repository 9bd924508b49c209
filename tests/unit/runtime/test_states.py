"""Who waits for the state of a slab that is on its way."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from megatron_flex.runtime.failure import CommunicationError
from megatron_flex.runtime.states import StateTransfers
from megatron_flex.runtime.world import World
from megatron_flex.twinlayer.errors import TwinError

WORLD = World(0, 1, torch.device("cpu"), timedelta(seconds=5))


class Arrival:
    """A slab that arrives when it is told to."""

    def __init__(self) -> None:
        self.here = threading.Event()
        self.waited_for = threading.Event()

    def wait(self) -> None:
        """As a message's."""
        self.waited_for.set()
        assert self.here.wait(10)


def test_what_changes_a_slab_waits_for_its_copy() -> None:
    states, go, order = StateTransfers(WORLD), threading.Event(), []

    def copy() -> None:
        assert go.wait(10)
        order.append("copied")

    with ThreadPoolExecutor(1) as pool:
        states.copy(3, lambda: pool.submit(copy))
        assert states.leaving == (3,)
        states.left(2)  # another slab
        threading.Timer(0.1, go.set).start()
        states.left(3)
        order.append("changed")
    assert order == ["copied", "changed"]
    assert not states.leaving


@pytest.mark.parametrize("late", [0, 1, 2])
def test_what_changes_a_slab_waits_for_all_its_copies(late: int) -> None:
    states, copies = StateTransfers(WORLD), [Arrival() for _ in range(3)]
    for number, copy in enumerate(copies):
        states.leave(3, copy)
        if number != late:
            copy.here.set()
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(states.left, 3)
        assert copies[late].waited_for.wait(10), "nobody waits for a copy that has not left"
        assert not left.done()
        copies[late].here.set()
        left.result(10)


def test_a_slab_that_is_still_arriving_is_copied_when_it_is_there() -> None:
    states, arrival = StateTransfers(WORLD), Arrival()
    states._arriving[3] = arrival
    begun: list[str] = []

    def begin() -> Future[None]:
        begun.append("copy")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    states.copy(3, begin)
    assert begun == []
    arrival.here.set()
    assert states.arrived(3)
    assert begun == ["copy"]
    assert states.leaving == (3,)
    states.left(3)
    assert not states.arrived(3)


def test_a_copy_that_does_not_end_names_slab_and_seconds() -> None:
    states = StateTransfers(World(0, 1, torch.device("cpu"), timedelta(seconds=1)))
    states.copy(3, Future)
    began = time.monotonic()
    words = "worker 0: 'copy of slab 3 into host memory' was not done within 1 s"
    with pytest.raises(CommunicationError, match=words):
        states.left(3)
    assert time.monotonic() - began < 5


def test_what_the_manager_refuses_is_said_in_its_words() -> None:
    states = StateTransfers(WORLD)
    failed: Future[None] = Future()
    failed.set_exception(TwinError("the arena is exhausted"))
    states.copy(3, lambda: failed)
    with pytest.raises(TwinError, match="the arena is exhausted"):
        states.left(3)


def test_without_host_copies_nobody_is_unready() -> None:
    states = StateTransfers(WORLD)
    assert not states.unready
    states.agree(True)
