"""Writes versions of the slabs' state into the arena, in the background."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megatron_flex.twinlayer import copies
from megatron_flex.twinlayer.arena import Arena, Entry
from megatron_flex.twinlayer.client import Client
from megatron_flex.twinlayer.errors import ManagerLost
from megatron_flex.twinlayer.turns import Turns


class Snapshots:
    """One worker's share of each version: the slabs that it owns.

    ``lost`` is true once the manager has ended; nothing is written from then on.
    """

    def __init__(self, client: Client, arena: Arena, device: torch.device, turns: Turns) -> None:
        self._client = client
        self._arena = arena
        self._turns = turns
        self._side = copies.Side(device)
        self._thread = ThreadPoolExecutor(1, "twin-snapshot")
        self._entries: dict[int, Entry] = {}
        self._version = 0
        self._failure: Exception | None = None
        self.lost = False

    def begin(self, version: int, sizes: Mapping[int, int], common: str | None = None) -> None:
        """Begin to write ``version`` (above 0): room for slabs, by number, of so many bytes.

        ``common`` is a JSON text with what belongs to the version beside the slabs; one worker of
        the server gives it.
        """
        self._version = version
        self._thread.submit(self._begin, version, dict(sizes), common)

    def save(self, slab: int, state: Tensor) -> Future[None]:
        """Copy ``state``, which must stay as it is until the result is there.

        The result raises :class:`TwinError` when the arena has no room for the slab.
        """
        return self._thread.submit(self._save, self._version, slab, state, self._side.now())

    def close(self) -> None:
        """Wait for the copies."""
        self._thread.shutdown(wait=True)
        self._turns.close()

    def _begin(self, version: int, sizes: dict[int, int], common: str | None) -> None:
        self._entries = {}
        self._failure = None
        if self.lost:
            return
        try:
            lines = [f"{slab} {size}" for slab, size in sizes.items()]
            offsets = self._client.request(f"BEGIN {version}", lines)["offsets"]
            if common is not None:
                self._client.request(f"COMMON {version}", body=common)
        except ManagerLost:
            self.lost = True
            return
        except Exception as error:  # said by whoever waits for the copies
            self._failure = error
            return
        for (slab, size), offset in zip(sizes.items(), offsets, strict=True):
            entry = self._entries[slab] = self._arena.entry(offset)
            if size:
                entry.touch()
            else:  # an embedding without positions, whose words are a slab of their own
                copies.keep(entry, torch.empty(0))

    def _save(self, version: int, slab: int, state: Tensor, after: torch.cuda.Event | None) -> None:
        if self._failure is not None:
            raise self._failure
        if self.lost:
            return
        entry = self._entries[slab]
        assert (entry.version, entry.bytes) == (version, state.nbytes)
        turn = self._turns.turn(slab, state.nbytes, background=True)
        with turn, self._side.after(after):
            copies.keep(entry, state)
