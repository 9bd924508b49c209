"""Messages as GPUs have them: staged in host memory over gloo, and over NCCL on connections that
are made by the first message."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from megatron_flex.runtime.channel import Channel
from megatron_flex.runtime.world import World
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import TIED

TIMEOUT = timedelta(seconds=30)


def exchange() -> list[float]:
    """Both workers send, then spoil what they have sent, and receive."""
    channel = replace(Channel.create(torch.device("cpu"), TIMEOUT), staged=True)
    peer = 1 - channel.rank
    got = torch.zeros(1000)
    message = channel.receive(got, peer)
    mine = torch.arange(1000.0) + channel.rank
    sent = channel.send(mine, peer)
    mine.zero_()
    message.wait(TIMEOUT)
    sent.wait(TIMEOUT)
    assert sent.is_completed()
    return got.tolist()


def test_a_staged_message_holds_what_was_sent(workers: WorkerPool) -> None:
    first, second = workers.run(2, exchange)
    assert first == (torch.arange(1000.0) + 1).tolist()
    assert second == torch.arange(1000.0).tolist()


def trained(*arguments: object, **keywords: object) -> jobs.Outcome:
    """``jobs.train`` with all messages staged, on connections that are made before."""
    create = World.create.__func__  # type: ignore[attr-defined]

    def staged(cls: type[World], *arguments: Any, **keywords: Any) -> World:
        world: World = create(cls, *arguments, **keywords)
        assert world.pipeline is not None
        assert world.state is not None
        world.pipeline = replace(world.pipeline, staged=True, lazy=True)
        world.state = replace(world.state, staged=True, lazy=True)
        return world

    World.create = classmethod(staged)  # type: ignore
    try:
        return jobs.train(*arguments, **keywords)  # type: ignore[arg-type]
    finally:
        World.create = classmethod(create)  # type: ignore


def test_training_has_the_same_bits_with_such_messages(workers: WorkerPool) -> None:
    plans = ["0:8@0,1", "0:3@0 | 3:6@1 | 6:8@2", "0:2@2 | 2:8@0"]
    expected, state = jobs.merge(workers.run(3, jobs.train, TIED, plans, 4, way="mixed"))
    results, other = jobs.merge(workers.run(3, trained, TIED, plans, 4, way="mixed"))
    assert results == expected
    assert all(values.equal(other[name]) for name, values in state.items())
