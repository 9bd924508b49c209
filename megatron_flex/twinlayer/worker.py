"""A worker's connection to the host copies of its server: what is kept, and what is on its way."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_flex.twinlayer.arena import Arena, Entry
from megatron_flex.twinlayer.client import Client
from megatron_flex.twinlayer.errors import ManagerLost
from megatron_flex.twinlayer.hand_overs import HandOvers
from megatron_flex.twinlayer.manager import Shape
from megatron_flex.twinlayer.snapshots import Snapshots
from megatron_flex.twinlayer.turns import Turns

_MOST_THREADS = 4


@dataclass(frozen=True)
class Member:
    """Who joins: ``rank`` in attempt ``attempt`` at the job, one of ``local_size`` workers here.

    ``linger``: seconds for which the manager waits for workers to come back when all have gone;
    ``timeout``: seconds for which a worker waits for each chunk of a hand-over.
    """

    rank: int
    attempt: str
    local_size: int
    linger: float
    timeout: float


@dataclass(frozen=True)
class Version:
    """A version that the manager holds, complete or not.

    ``entries`` are the complete slabs by number; ``common`` is what belongs to it beside slabs.
    """

    number: int
    entries: dict[int, Entry]
    common: dict[str, Any] | None


class TwinLayers:
    """One worker's access to the arena of its server's manager.

    Attributes:
        shape: what the arena was made for.
        snapshots: writes versions for recovery.
        hand_overs: slabs from worker to worker.
    """

    def __init__(self, socket: Path, member: Member, device: torch.device) -> None:
        """Raises :class:`ManagerLost` when no manager listens at ``socket``."""
        self._client = Client(socket)
        descriptor, shape = self._client.hello(member.attempt, member.rank, member.linger)
        self.shape = Shape(shape["banks"], shape["bank_bytes"], shape["room_bytes"])
        self.arena = Arena(descriptor, shape["bytes"], device)
        self._turns = [Turns(socket, member.timeout) for _ in range(2)]
        self.snapshots = Snapshots(self._client, self.arena, device, self._turns[0])
        cores = len(os.sched_getaffinity(0))
        threads = max(1, min(_MOST_THREADS, cores // member.local_size))
        self.hand_overs = HandOvers(
            self._client, self.arena, device, self._turns[1], member.timeout, threads
        )

    @property
    def lost(self) -> bool:
        """Whether the manager has ended."""
        asked = self.snapshots.lost or self.hand_overs.lost
        return asked or any(turns.lost for turns in self._turns) or self._client.ended()

    def versions(self) -> list[Version]:
        """The versions there are, newest first."""
        found = []
        for version in self._client.request("LIST")["versions"]:
            entries = {s: self.arena.entry(at) for s, at, complete in version["slabs"] if complete}
            found.append(Version(version["version"], entries, version["common"]))
        return sorted(found, key=lambda v: -v.number)

    def adopt(self, version: int) -> None:
        """Keep ``version`` alone, to go on from it; 0 forgets all versions."""
        self._client.request(f"ADOPT {version}")

    def end(self) -> None:
        """End the manager: the job is over."""
        try:
            self._client.request("END")
        except ManagerLost:
            pass

    def close(self) -> None:
        """Wait for copies, and leave."""
        self.snapshots.close()
        self.hand_overs.close()
        self._client.close()
        self.arena.close()
