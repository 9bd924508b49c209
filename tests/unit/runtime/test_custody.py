"""A slab's life, and who waits for what of it is on its way."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from megatron_flex.runtime.custody import Custody, State
from megatron_flex.runtime.failure import CommunicationError
from megatron_flex.runtime.states import StateTransfers
from megatron_flex.runtime.world import World
from megatron_flex.schedule.instructions import Recut, RecvPiece, RecvState
from megatron_flex.twinlayer.errors import TwinError
from tests.unit.runtime.test_executor_waits import OnItsWay
from tests.unit.runtime.test_memory import Worker

WORLD = World(0, 1, torch.device("cpu"), timedelta(seconds=5))


def custody(world: World = WORLD) -> Custody:
    """That of a worker which holds all slabs."""
    return Custody(world, Worker().holdings)


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
    slabs, go, order = custody(), threading.Event(), []

    def copy() -> None:
        assert go.wait(10)
        order.append("copied")

    with ThreadPoolExecutor(1) as pool:
        slabs.copy(3, lambda: pool.submit(copy))
        slabs.changeable(2)  # another slab
        threading.Timer(0.1, go.set).start()
        slabs.changeable(3)
        order.append("changed")
    assert order == ["copied", "changed"]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_what_changes_a_slab_waits_for_all_its_copies(late: int) -> None:
    slabs, copies = custody(), [Arrival() for _ in range(3)]
    for number, copy in enumerate(copies):
        slabs.leave(3, copy)
        if number != late:
            copy.here.set()
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(slabs.changeable, 3)
        assert copies[late].waited_for.wait(10), "nobody waits for a copy that has not left"
        assert not left.done()
        copies[late].here.set()
        left.result(10)


def test_a_slab_that_is_still_arriving_is_copied_when_it_is_there() -> None:
    slabs, arrival = custody(), Arrival()
    slabs._holdings.drop(3)
    slabs.carriers.receive = lambda op, state: arrival  # type: ignore
    slabs.receive(RecvState(3, 1), offloaded=False)
    begun: list[str] = []

    def begin() -> Future[None]:
        begun.append("copy")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    slabs.copy(3, begin)
    assert begun == []
    arrival.here.set()
    assert slabs.usable(3)
    assert begun == ["copy"]
    slabs.changeable(3)
    assert not slabs.usable(3)


def test_optimizer_state_goes_to_the_host_when_it_is_there() -> None:
    slabs, order = custody(), []
    slabs._holdings.drop(3)
    slabs.carriers.receive = lambda op, state: OnItsWay(lambda: order.append("came"))  # type: ignore
    rehouse = slabs._holdings.rehouse

    def noted(number: int, *, offloaded: bool) -> None:
        order.append("went")
        rehouse(number, offloaded=offloaded)

    slabs._holdings.rehouse = noted  # type: ignore
    slabs.receive(RecvState(3, 1), offloaded=False)
    slabs.rehouse(3, offloaded=True)
    assert order == ["came", "went"]


def test_a_slab_has_its_next_part_when_all_pieces_have_come() -> None:
    slabs, pieces = custody(), [Arrival() for _ in range(3)]
    came = iter(pieces)
    slabs.carriers.receive = lambda op, tensor: next(came)  # type: ignore
    numel = slabs._holdings.slabs[3].layout.numel
    slabs._holdings.drop(3)
    slabs.recut(Recut(3, 0, numel))
    slabs.receive_piece(RecvPiece(3, 0, numel, 1))
    for piece in pieces[:2]:
        piece.here.set()
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(slabs.changeable, 3)
        assert pieces[2].waited_for.wait(10), "nobody waits for a piece that has not come"
        assert not whole.done()
        pieces[2].here.set()
        whole.result(10)


def test_a_copy_that_does_not_end_names_slab_and_seconds() -> None:
    slabs = custody(World(0, 1, torch.device("cpu"), timedelta(seconds=1)))
    slabs.copy(3, Future)
    began = time.monotonic()
    words = "worker 0: 'copy of slab 3 into host memory' was not done within 1 s"
    with pytest.raises(CommunicationError, match=words):
        slabs.changeable(3)
    assert time.monotonic() - began < 30


def test_what_the_manager_refuses_is_said_in_its_words() -> None:
    slabs = custody()
    failed: Future[None] = Future()
    failed.set_exception(TwinError("the arena is exhausted"))
    slabs.copy(3, lambda: failed)
    with pytest.raises(TwinError, match="the arena is exhausted"):
        slabs.changeable(3)


def test_a_slab_lives_as_it_may_and_no_other_way() -> None:
    slabs = custody()
    slabs.carriers.receive = lambda op, state: OnItsWay(lambda: None)  # type: ignore
    numel = slabs._holdings.slabs[3].layout.numel

    def receive() -> None:
        slabs.receive(RecvState(3, 1), offloaded=False)

    def recut() -> None:
        slabs.recut(Recut(3, 0, numel))

    steps: dict[State, list[tuple[Callable[[], object], State | None]]] = {
        State.HERE: [(receive, None), (recut, State.CUT), (lambda: slabs.drop(3), State.ABSENT)],
        State.ABSENT: [(receive, State.ARRIVING), (recut, State.CUT)],
        State.ARRIVING: [(receive, None), (lambda: slabs.usable(3), State.HERE)],
        State.CUT: [(receive, None), (recut, None), (lambda: slabs.changeable(3), State.HERE)],
    }
    for path in itertools.product(range(3), repeat=5):
        slabs.settle()
        if slabs.state(3) is State.ABSENT:
            receive()
            slabs.settle()
        for choice in path:
            state = slabs.state(3)
            step, after = steps[state][choice % len(steps[state])]
            if after is None:
                with pytest.raises(RuntimeError, match="slab 3 cannot go from"):
                    step()
                assert slabs.state(3) is state
            else:
                step()
                assert slabs.state(3) is after
    slabs.settle()


def test_without_host_copies_nobody_is_unready() -> None:
    states = StateTransfers(WORLD)
    assert not states.unready
    states.agree(True)
