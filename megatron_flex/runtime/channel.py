"""World-wide point-to-point messages of one kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

_NO_LIMIT = timedelta(0)
"""Waiting ends with the group's own time-out."""


class Message(Protocol):
    """A message under way."""

    def wait(self, timeout: timedelta) -> bool:
        """Return when it is done; raises ``RuntimeError``."""

    def is_completed(self) -> bool:
        """Whether it is done."""


@dataclass(frozen=True)
class Staged:
    """A message to or from a GPU over gloo, which reads and writes host memory only.

    ``host`` is what travels. A receiver's wait queues the copy to ``target`` on the current stream.
    """

    work: dist.Work
    host: torch.Tensor
    target: torch.Tensor | None = None

    def wait(self, timeout: timedelta) -> bool:
        """Return when the message is there, or delivered."""
        done: bool = self.work.wait(timeout)
        if self.target is not None:
            self.target.copy_(self.host, non_blocking=True)
        return done

    def is_completed(self) -> bool:
        """Whether the message is there, or delivered."""
        return self.work.is_completed()


@dataclass(frozen=True)
class Channel:
    """Point-to-point traffic of one kind, one group for each direction.

    With NCCL a receive that is posted early would block the sends behind it on the same group;
    with one group for messages to higher ranks and one for those to lower ranks it cannot.

    ``staged``: tensors on a GPU go by way of host memory. Workers that share a GPU use gloo, since
    NCCL wants one GPU for each.

    Peers are devices. Where ``sharing`` workers are one device, the one number ``index`` of each
    talks to that number of the others.

    ``lazy``: a connection is made by the first message between two peers, and both hosts wait for
    each other meanwhile, in receives that are posted ahead too (NCCL). See :meth:`connect`.
    """

    rank: int
    up: dist.ProcessGroup
    down: dist.ProcessGroup
    staged: bool = False
    index: int = 0
    sharing: int = 1
    lazy: bool = False
    _connected: set[int] = field(default_factory=set, compare=False)

    @classmethod
    def create(cls, device: torch.device, timeout: timedelta, sharing: int = 1) -> Channel:
        """Make both groups. Collective."""
        up, down = (dist.new_group(timeout=timeout) for _ in range(2))
        staged = device.type != "cpu" and dist.get_backend() == "gloo"
        rank, index = divmod(dist.get_rank(), sharing)
        return cls(rank, up, down, staged, index, sharing, dist.get_backend() == "nccl")

    def connect(self, peers: Iterable[int], device: torch.device) -> None:
        """Have connections to ``peers``, which call this too. Nothing may be on its way.

        Does nothing unless the channel is ``lazy``, or for peers that were connected before.
        """
        if not self.lazy:
            return
        for peer in meetings(self.rank, set(peers) - self._connected):
            word = torch.zeros(1, device=device)
            ways = [self.send, self.receive]
            for way in ways if peer > self.rank else reversed(ways):
                way(word, peer).wait(_NO_LIMIT)
            self._connected.add(peer)

    def send(self, tensor: torch.Tensor, peer: int) -> Message:
        """Begin to send; ``tensor`` must stay as it is until the message is done."""
        data = self._host(tensor).copy_(tensor) if self.staged else tensor
        group = self.up if peer > self.rank else self.down
        work = dist.isend(data, self._process(peer), group=group)
        assert work is not None
        return Staged(work, data) if self.staged else work

    def receive(self, tensor: torch.Tensor, peer: int) -> Message:
        """Begin to receive into ``tensor``."""
        data = self._host(tensor) if self.staged else tensor
        group = self.down if peer > self.rank else self.up
        work = dist.irecv(data, self._process(peer), group=group)
        assert work is not None
        return Staged(work, data, tensor) if self.staged else work

    def _process(self, device: int) -> int:
        return device * self.sharing + self.index

    @staticmethod
    def _host(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def meetings(rank: int, peers: Iterable[int]) -> list[int]:
    """The order in which a worker meets its peers one by one, so that all meet.

    All pairs have one order, by the lower of both and then the higher, so nobody waits for a peer
    that waits for another.
    """
    return sorted(peers, key=lambda peer: (min(peer, rank), max(peer, rank)))
