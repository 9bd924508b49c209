"""What an iteration consists of: operations, what each waits for, how long it takes, what it holds.

This is the one place that knows which operations are neighbours. The pass that places operations,
the replay that times them, the lists of instructions and the drawings read these arrays.

An operation is one integer, its code: ``(kind * stages + stage) * micro_batches + micro_batch``.

What waits for what:

- a forward on a stage, for that on the stage before (its activation);
- a backward, for the forward on its stage, and for the backward on the stage after (its gradient);
- the weight half of a split backward, for the input half;
- along a chain (the slices of one sample, in order), on every stage: the forward of a slice for
  that of the slice before, and its backward for that of the slice after: keys and values are passed
  on, and their gradients come back.

What is held: a forward's activation until its last operation. A chain is admitted to memory as a
whole, with its keys and values and their gradients, by the forward of its first slice: its other
slices take nothing more, so a chain that has begun on a device never waits there for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_flex.schedule.costs import OpCosts

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class OpKind(IntEnum):
    """What an operation computes. ``BACKWARD`` is the input half where the backward is split."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2


@dataclass(frozen=True, eq=False)
class Operations:
    """All operations of an iteration; arrays are indexed by operation code, or by edge.

    Attributes:
        kinds, stages, batches: numbers of each; a code is less than their product.
        devices: one more than the highest device.
        device: where it runs.
        seconds: how long.
        takes: bytes that it takes on its device when it begins.
        frees: bytes that it gives back when it ends.
        needs: number of operations that it waits for.
        offset: its edges are ``offset[code]`` to ``offset[code + 1]``.
        target: of an edge: the operation that waits for this one.
        wire: of an edge: seconds on the link between the two devices; 0 on one device.
        lead: of each micro-batch: the first of its chain, itself if it is in none.
    """

    kinds: int
    stages: int
    batches: int
    devices: int
    device: Integers
    seconds: Floats
    takes: Floats
    frees: Floats
    needs: Integers
    offset: Integers
    target: Integers
    wire: Floats
    lead: Integers

    @property
    def source(self) -> Integers:
        """Of each edge: the operation that it comes from."""
        return np.repeat(np.arange(len(self.device)), np.diff(self.offset))

    def senders(self) -> Integers:
        """For each operation, the one whose message it needs from another device; -1 for none."""
        source = self.source
        crosses = self.device[source] != self.device[self.target]
        found = np.full(len(self.device), -1)
        found[self.target[crosses]] = source[crosses]
        return found


def operations(
    costs: OpCosts,
    route: Integers,
    devices: int,
    *,
    split: bool = False,
    forward_only: bool = False,
    chains: Sequence[Sequence[int]] = (),
) -> Operations:
    """The operations of an iteration.

    Args:
        route: ``[stages, micro_batches]``, the device of each.
        devices: one more than the highest device that holds a stage.
        split: the backward is two operations.
        forward_only: there is none.
        chains: micro-batches that hold the slices of one sample, in order; checked by
            :func:`check_chains`.
    """
    stages, batches = route.shape
    kinds = 1 if forward_only else 3 if split else 2
    edges = _edges(kinds, stages, batches, tuple(map(tuple, chains)))
    between = np.where(route[1:] != route[:-1], costs.transfer, 0.0).ravel()
    wire = np.zeros(len(edges.target))
    for places in edges.wired:
        wire[places] = between
    takes, frees = _memory(costs, kinds, edges.lead, chains)
    return Operations(
        kinds,
        stages,
        batches,
        devices,
        np.tile(route.ravel(), kinds),
        _seconds(costs, kinds),
        takes,
        frees,
        edges.needs,
        edges.offset,
        edges.target,
        wire,
        edges.lead,
    )


@dataclass(frozen=True, eq=False)
class _Edges:
    """What waits for what, which neither costs nor the routing change.

    ``needs``, ``offset``, ``target`` and ``lead`` are those of :class:`Operations`. ``wired``:
    places of the edges between stages in the order of boundary and micro-batch, forwards first.
    """

    needs: Integers
    offset: Integers
    target: Integers
    lead: Integers
    wired: tuple[Integers, ...]


@lru_cache(maxsize=256)
def _edges(kinds: int, stages: int, batches: int, chains: tuple[tuple[int, ...], ...]) -> _Edges:
    size = stages * batches
    code = np.arange(kinds * size).reshape(kinds, stages, batches)
    forward, backward = code[0], code[min(1, kinds - 1)]
    edges: list[tuple[Integers, Integers]] = [(forward[:-1], forward[1:])]
    if kinds > 1:
        edges.append((backward[1:], backward[:-1]))
    between = len(edges)
    if kinds > 1:
        edges.append((forward, backward))
    if kinds > 2:
        edges.append((backward, code[2]))
    lead = np.arange(batches)
    for chain in chains:
        own = np.array(chain)
        lead[own] = own[0]
        edges.append((forward[:, own[:-1]], forward[:, own[1:]]))
        if kinds > 1:
            edges.append((backward[:, own[1:]], backward[:, own[:-1]]))
    source = np.concatenate([e[0].ravel() for e in edges])
    target = np.concatenate([e[1].ravel() for e in edges])
    order = np.argsort(source, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    wires = size - batches
    offset = np.zeros(kinds * size + 1, dtype=np.int64)
    np.cumsum(np.bincount(source, minlength=kinds * size), out=offset[1:])
    found = _Edges(
        np.bincount(target, minlength=kinds * size),
        offset,
        target[order],
        lead,
        tuple(place[i * wires : (i + 1) * wires] for i in range(between)),
    )
    for array in (found.needs, found.offset, found.target, found.lead, *found.wired):
        array.flags.writeable = False  # shared by all that have this shape
    return found


def _seconds(costs: OpCosts, kinds: int) -> Floats:
    forward, first, second = costs.forward, costs.backward_input, costs.backward_weight
    parts = {1: [forward], 2: [forward, first + second], 3: [forward, first, second]}[kinds]
    return np.concatenate([part.ravel() for part in parts])


def _memory(
    costs: OpCosts, kinds: int, lead: Integers, chains: Sequence[Sequence[int]]
) -> tuple[Floats, Floats]:
    """Bytes that each operation takes and frees."""
    activation = costs.activation
    shape = (kinds, *activation.shape)
    takes, frees = np.zeros(shape), np.zeros(shape)
    if kinds > 1:
        takes[0] = activation
        frees[-1] = activation
        if chains:
            # The first slice takes for all, and its backward, the last of the chain's, frees.
            members = np.array([m for chain in chains for m in chain])
            whole, all_of = np.zeros_like(activation.T), np.zeros_like(activation.T)
            np.add.at(whole, lead[members], costs.chain_bytes.T[members])
            np.add.at(all_of, lead[members], activation.T[members])
            first = np.unique(lead[members])
            takes[0][:, members] = 0.0
            takes[0][:, first] = (all_of + whole)[first].T
            frees[1][:, first] += whole[first].T
    return takes.ravel(), frees.ravel()


def check_chains(
    chains: Sequence[Sequence[int]], batches: int, route: Sequence[Sequence[int]] = ()
) -> None:
    """Raise ``ValueError`` unless chains are of several micro-batches, each in one chain at most.

    And on one device of each stage, where there is a ``route[stage][micro_batch]``.
    """
    seen: set[int] = set()
    for chain in chains:
        if len(chain) < 2:
            raise ValueError(f"a chain has at least two micro-batches, not {tuple(chain)}")
        for micro_batch in chain:
            if not 0 <= micro_batch < batches or micro_batch in seen:
                raise ValueError(
                    f"the chain {tuple(chain)} names micro-batch {micro_batch}, which is in another"
                    f" place of a chain or not among 0 to {batches - 1}"
                )
            seen.add(micro_batch)
        for stage, row in enumerate(route):
            if len({row[m] for m in chain}) > 1:
                raise ValueError(
                    f"the chain {tuple(chain)} is on several devices of stage {stage}:"
                    " its slices need one another's keys and values"
                )
