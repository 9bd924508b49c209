"""The whole state of sharded slabs, collected from their parts and filled into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.slab import Slab
from megatron_flex.runtime.world import World, explain
from megatron_flex.schedule.shards import owners


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
