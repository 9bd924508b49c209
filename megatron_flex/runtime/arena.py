"""Hand-overs through the host memory of a server: which of a program's go there, and where to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from megatron_flex.schedule.instructions import SendState, StateOp
from megatron_flex.schedule.part import Part
from megatron_flex.twinlayer.arena import Entry
from megatron_flex.twinlayer.hand_overs import HandOver, HandOvers


@dataclass
class Place:
    """Where one slab is handed over: written once, read by any number of workers."""

    hand_overs: HandOvers
    entry: Entry
    _written: Future[None] | None = field(default=None)

    def write(self, state: torch.Tensor) -> Future[None]:
        """Begin to write, for the first of the readers; the others read the same copy."""
        if self._written is None:
            self._written = self.hand_overs.write(self.entry, state)
        return self._written

    def read(self, state: torch.Tensor) -> Future[None]:
        """Begin to read; waits for each chunk to be written."""
        return self.hand_overs.read(self.entry, state)


class ArenaTransport:
    """The hand-overs of one worker to and from others of its server.

    Both ends of a hand-over must take the same way. Places are asked for when the iteration begins,
    and the workers tell one another at the global norm, before the first hand-over, whether all
    have their answer. ``open`` says so.
    """

    def __init__(self, rank: int, servers: Sequence[int], hand_overs: HandOvers | None) -> None:
        """``servers[rank]`` is a number for the server of each worker."""
        self._rank = rank
        self._servers = tuple(servers)
        self._hand_overs = hand_overs
        self._serial = 0
        self._places: dict[tuple[int, int], Place] = {}
        self.open = False

    def renew(self, hand_overs: HandOvers | None) -> None:
        """Go on through another manager, or by messages. Nothing may be on its way."""
        self.open = False
        self._places.clear()
        self._hand_overs = hand_overs

    def prepare(self, part: Part, state_bytes: Callable[[int], int]) -> None:
        """Take places for this worker's hand-overs in an iteration, in the background.

        ``state_bytes(slab)`` is the size of a slab's state.
        """
        self.open = False
        self._places.clear()
        if not part.hand_overs or self._hand_overs is None:
            return
        readers: Counter[tuple[int, int]] = Counter()
        mine: dict[tuple[int, int], None] = {}  # in the order of the program
        here = self._servers[self._rank]
        for slab, source, target in part.hand_overs:
            if self._servers[source] == here == self._servers[target]:
                readers[source, slab] += 1
                if self._rank in (source, target) and state_bytes(slab):
                    mine[source, slab] = None
        if readers:
            self._serial += 1
        if mine:
            self._hand_overs.reserve(
                self._serial,
                [HandOver(*key, state_bytes(key[1]), readers[key]) for key in mine],
            )

    def ready(self) -> bool:
        """Wait for the places; whether they could be asked for."""
        return self._hand_overs is None or self._hand_overs.reserved()

    def place(self, op: StateOp) -> Place | None:
        """Where ``op`` goes; ``None``: from worker to worker."""
        here = self._servers[self._rank]
        if not self.open or self._hand_overs is None or self._servers[op.peer] != here:
            return None
        source = self._rank if isinstance(op, SendState) else op.peer
        key = source, op.slab
        if key not in self._places:
            entry = self._hand_overs.entry(*key)
            if entry is None:
                return None
            self._places[key] = Place(self._hand_overs, entry)
        return self._places[key]
