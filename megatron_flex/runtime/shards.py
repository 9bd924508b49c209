"""Sharded slabs on a worker: parts that are cut anew, gathers of parameters, the whole state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_flex.runtime.communicator import explain
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.slab import Slab
from megatron_flex.runtime.states import PeerTransport, Pending, StateTransfers
from megatron_flex.runtime.world import World
from megatron_flex.schedule.instructions import GatherParameters, Recut, RecvPiece, SendPiece
from megatron_flex.schedule.shards import owners


class ShardMoves:
    """What of a worker's sharded slabs is on its way."""

    def __init__(self, world: World, holdings: Holdings, states: StateTransfers) -> None:
        self._world = world
        self._holdings = holdings
        self._states = states
        self._peers = PeerTransport(world)
        self._next: dict[int, Recut] = {}
        self._targets: dict[int, Slab] = {}  # what pieces of a slab are received into
        self._arriving: dict[int, list[Pending]] = {}
        self._gathers: dict[int, list[dist.Work]] = {}

    @property
    def cut_anew(self) -> tuple[int, ...]:
        """Slabs that have another part, or another state, from their update on."""
        return tuple(self._next)

    def recut(self, op: Recut) -> None:
        """Make room for a part. A slab whose whole state is here is cut when it is updated."""
        part = op.start, op.stop
        self._next[op.slab] = op
        slab = self._holdings.slabs.get(op.slab)
        if slab is None:
            self._targets[op.slab] = self._holdings.join(op.slab, part=part)
        elif slab.sharded:
            self._targets[op.slab] = self._holdings.recut(op.slab, part)

    def send(self, op: SendPiece) -> None:
        """Begin to send a piece of the present part; :meth:`StateTransfers.left` waits for it."""
        for tensor in self._holdings.slabs[op.slab].piece(op.start, op.stop):
            self._states.leave(op.slab, self._peers.send(op, tensor.to(self._world.device)))

    def receive(self, op: RecvPiece) -> None:
        """Begin to receive a piece of the next part."""
        arriving = self._arriving.setdefault(op.slab, [])
        for tensor in self._targets[op.slab].piece(op.start, op.stop):
            arriving.append(self._peers.receive(op, tensor))

    def finish(self, number: int) -> None:
        """Before the update: give up the present part of a slab for the next, if there is one."""
        op = self._next.pop(number, None)
        if op is None:
            return
        for message in self._arriving.pop(number, ()):
            message.wait()
        self._states.left(number)
        target = self._targets.pop(number, None)
        if target is None:
            self._holdings.cut(number, (op.start, op.stop))
        else:
            self._holdings.install(target)

    def gather(self, op: GatherParameters) -> None:
        """Begin to gather a slab's parameters."""
        slab = self._holdings.slabs[op.slab]
        if slab.layout.numel:
            assert self._world.reductions is not None
            with explain(op, self._world):
                self._gathers[op.slab] = self._world.reductions.all_gather(slab.params, op.group)

    def gathered(self, number: int) -> bool:
        """Wait for a slab's parameters, if they are being gathered; whether they were."""
        works = self._gathers.pop(number, ())
        for work in works:
            with explain(f"gathering the parameters of slab {number}", self._world):
                work.wait(self._world.timeout)
        return bool(works)

    def settle(self) -> None:
        """Wait for all gathers."""
        for number in tuple(self._gathers):
            self.gathered(number)


def collect(world: World, holdings: Holdings) -> dict[int, Slab]:
    """The sharded slabs that this worker is the owner of, with their whole state on the host.

    All workers together, between iterations, when nothing is on its way.
    """
    found = {}
    for number, group in holdings.shared.items():
        slab = holdings.slabs[number]
        assert world.state is not None
        what = f"collecting the optimizer state of slab {number}"
        if world.rank != group[0]:
            for tensor in slab.piece(*slab.part):
                with explain(what, world):
                    world.state.send(tensor, group[0]).wait(world.timeout)
            continue
        whole = found[number] = slab.spread()
        for peer, part in owners(group, slab.layout.numel, sharded=True).items():
            for tensor in whole.piece(*part) if peer != world.rank else ():
                received = torch.empty_like(tensor, device=world.device)
                with explain(what, world):
                    world.state.receive(received, peer).wait(world.timeout)
                tensor.copy_(received)
    return found


def owned_state(
    world: World, holdings: Holdings, *, optimizer: bool = True
) -> dict[str, torch.Tensor]:
    """All state of owned slabs by checkpoint name. As :func:`collect`."""
    whole = collect(world, holdings) if optimizer else {}
    merged: dict[str, torch.Tensor] = {}
    for number in holdings.owned:
        slab = whole.get(number, holdings.slabs[number])
        merged.update(slab.named_state(optimizer=optimizer))
    return merged


@contextmanager
def filling(holdings: Holdings) -> Iterator[dict[int, Slab]]:
    """All held slabs with whole states, to be filled; parts of sharded ones are taken at the end.

    Parameters are the held slabs' own.
    """
    whole = {slab.index: slab.spread() if slab.sharded else slab for slab in holdings}
    yield whole
    for number, slab in whole.items():
        if holdings.slabs[number] is not slab:
            holdings.slabs[number].take_part(slab)
