"""What uses, changes or passes on a slab waits for what is on its way, in a world of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_flex.runtime.executor import Executor
from megatron_flex.schedule.instructions import Drop, RecvState, SendState
from tests.unit.runtime.test_memory import Worker

SLAB = 2


@dataclass
class OnItsWay:
    """A message that has ended when somebody waits for it; ``end`` is called then."""

    end: Callable[[], object]
    waited: int = 0

    def wait(self) -> None:
        """As a message's."""
        self.waited += 1
        self.end()


class Wire:
    """Stands in for the messages to other workers: keeps what is sent, as it is at that moment."""

    def __init__(self) -> None:
        self.sent: list[tuple[SendState, torch.Tensor]] = []
        self.arrives: Callable[[torch.Tensor], object] = lambda state: state.fill_(1.0)

    def send(self, op: SendState, state: torch.Tensor) -> OnItsWay:
        """Keep a copy."""
        self.sent.append((op, state.clone()))
        return OnItsWay(lambda: None)

    def receive(self, op: RecvState, state: torch.Tensor) -> OnItsWay:
        """A state of ones, or as ``arrives`` says, which comes when it is waited for."""
        return OnItsWay(lambda: self.arrives(state))


@pytest.fixture
def worker() -> Worker:
    return Worker()


def wired(executor: Executor) -> Wire:
    wire = Wire()
    carriers: Any = executor.custody.carriers
    carriers.send, carriers.receive = wire.send, wire.receive
    return wire


def test_an_update_waits_for_a_state_that_is_being_sent(worker: Worker) -> None:
    slab = worker.holdings.slabs[SLAB]
    before = slab.state.clone()
    found: list[torch.Tensor] = []
    leaving = [OnItsWay(lambda: found.append(slab.state.clone())) for _ in range(2)]
    for message in leaving:
        worker.executor.custody.leave(SLAB, message)
    worker.step()
    assert [message.waited for message in leaving] == [1, 1]
    assert all(torch.equal(state, before) for state in found), "sent while it was updated"
    assert not torch.equal(slab.state, before), "there was an update"


def test_a_slab_goes_when_its_state_has_left(worker: Worker) -> None:
    holdings = worker.holdings
    found: list[bool] = []
    leaving = OnItsWay(lambda: found.append(SLAB in holdings.slabs))
    worker.executor.custody.leave(SLAB, leaving)
    run: Any = type("Run", (), {"reductions": {}, "finished": set()})
    worker.executor._drop(run, Drop(SLAB))
    assert found == [True]
    assert SLAB not in holdings.slabs


def test_a_state_is_sent_on_when_it_has_arrived(worker: Worker) -> None:
    executor, holdings = worker.executor, worker.holdings
    wire = wired(executor)
    holdings.drop(SLAB)
    executor.switch([RecvState(SLAB, 1), SendState(SLAB, 2)])
    ((op, state),) = wire.sent
    assert op == SendState(SLAB, 2)
    assert (state == 1.0).all()


def test_a_unit_computes_with_weights_that_have_arrived(worker: Worker) -> None:
    executor, holdings = worker.executor, worker.holdings
    (expected,) = [worker.step().losses]
    fresh = Worker()
    executor, holdings = fresh.executor, fresh.holdings
    weights = holdings.slabs[SLAB].state.clone()
    holdings.drop(SLAB)
    wire = wired(executor)
    wire.arrives = lambda state: state.copy_(weights)
    executor.custody.receive(RecvState(SLAB, 1), offloaded=False)
    holdings.slabs[SLAB].state.fill_(7.0)
    holdings.slabs[SLAB].params_from_masters()
    assert fresh.step().losses == expected
