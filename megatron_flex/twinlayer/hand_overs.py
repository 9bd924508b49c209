"""Slabs from worker to worker of one server, through the arena.

The manager is asked for places before it matters, while the iteration computes. After the update
the writer waits for its turn, publishes chunks, and the readers take them, even if the manager has
ended meanwhile: then there are no turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_flex.twinlayer import copies
from megatron_flex.twinlayer.arena import Arena, Entry
from megatron_flex.twinlayer.client import Client
from megatron_flex.twinlayer.errors import ManagerLost
from megatron_flex.twinlayer.turns import Turns


@dataclass(frozen=True)
class HandOver:
    """``slab`` of ``bytes`` goes from worker ``source`` to ``readers`` others of its server."""

    source: int
    slab: int
    bytes: int
    readers: int


class HandOvers:
    """One worker's part in hand-overs. ``lost`` is true once the manager has ended."""

    def __init__(
        self,
        client: Client,
        arena: Arena,
        device: torch.device,
        turns: Turns,
        timeout: float,
        threads: int,
    ) -> None:
        """``timeout`` is in seconds for each chunk, ``threads`` those of one copy."""
        self._client = client
        self._arena = arena
        self._turns = turns
        self._timeout = timeout
        self._threads = threads
        self._sides = copies.Side(device), copies.Side(device)
        self._writer = ThreadPoolExecutor(1, "twin-write")
        self._reader = ThreadPoolExecutor(1, "twin-read")
        self._places: Future[dict[tuple[int, int], Entry | None]] | None = None
        self.lost = False

    def reserve(self, serial: int, wanted: Sequence[HandOver]) -> None:
        """Take places for this worker's part of switch ``serial``, in the background.

        Writer and readers must name a hand-over alike.
        """
        self._places = self._writer.submit(self._reserve, serial, tuple(wanted))

    def reserved(self) -> bool:
        """Wait for the places; ``False`` when the manager has ended."""
        if self._places is not None:
            self._places.result()
        return not self.lost

    def entry(self, source: int, slab: int) -> Entry | None:
        """The place of a hand-over; ``None`` when the manager has none for it."""
        assert self._places is not None
        return self._places.result().get((source, slab))

    def write(self, entry: Entry, state: Tensor) -> Future[None]:
        """Hand over ``state``, which must stay as it is until the result is there."""
        return self._writer.submit(self._write, entry, state, self._sides[0].now())

    def read(self, entry: Entry, state: Tensor) -> Future[None]:
        """Fill ``state``; the result raises :class:`TwinError` when it does not come."""
        return self._reader.submit(self._read, entry, state, self._sides[1].now())

    def close(self) -> None:
        """Wait for the copies."""
        self._writer.shutdown(wait=True)
        self._reader.shutdown(wait=True)
        self._turns.close()

    def _reserve(
        self, serial: int, wanted: tuple[HandOver, ...]
    ) -> dict[tuple[int, int], Entry | None]:
        if self.lost:
            return {}
        lines = [f"{h.source} {h.slab} {h.bytes} {h.readers}" for h in wanted]
        try:
            offsets = self._client.request(f"HANDOVER {serial}", lines)["offsets"]
        except ManagerLost:
            self.lost = True
            return {}
        places: dict[tuple[int, int], Entry | None] = {}
        for hand_over, offset in zip(wanted, offsets, strict=True):
            entry = self._arena.entry(offset) if offset else None
            if entry is not None:
                entry.touch()
            places[hand_over.source, hand_over.slab] = entry
        return places

    def _write(self, entry: Entry, state: Tensor, after: torch.cuda.Event | None) -> None:
        with self._turns.turn(entry.slab, entry.bytes), self._sides[0].after(after):
            copies.write(entry, state, self._threads)
        entry.complete(0)

    def _read(self, entry: Entry, state: Tensor, after: torch.cuda.Event | None) -> None:
        with self._sides[1].after(after):
            copies.read(entry, state, self._timeout, self._threads)
        entry.take()
