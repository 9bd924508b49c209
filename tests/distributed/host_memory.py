"""A manager of host copies for a job on the pool's workers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_flex.runtime.arena import ArenaTransport
from megatron_flex.runtime.world import World
from megatron_flex.twinlayer.client import status_of
from megatron_flex.twinlayer.location import socket_of
from megatron_flex.twinlayer.manager import Shape, start
from megatron_flex.twinlayer.worker import Member, TwinLayers

FAREWELL = 1.0
"""Seconds for which the managers of these jobs outlast them."""


class HostMemory:
    """One worker's connection; ``servers`` gives the server of each worker (default: one).

    :meth:`connect` is collective. Use it in a ``with`` statement.
    """

    def __init__(self, room_bytes: int, servers: Sequence[int] | None = None) -> None:
        self._shape = Shape(0, 0, room_bytes)
        self._given = servers
        self._layers: TwinLayers | None = None
        self.socket = Path()

    def connect(self, world: World) -> ArenaTransport:
        """Start the manager of this server if this worker leads it, and join."""
        self._world = world
        servers = tuple(self._given or (0,) * world.size)
        job = f"{world.broadcast(secrets.token_hex(8))}, server {servers[world.rank]}"
        self.socket = socket_of(job)
        if servers.index(servers[world.rank]) == world.rank:
            assert start(self.socket, job, self._shape, 30.0)
        world.barrier()
        member = Member(world.rank, "attempt 0.0", world.size, FAREWELL, 20.0)
        self._layers = TwinLayers(self.socket, member, world.device)
        return ArenaTransport(world.rank, servers, self._layers.hand_overs)

    def status(self) -> dict[str, Any]:
        """What the manager says when all workers have come here; nothing when it is dead."""
        self._world.barrier()
        found = status_of(self.socket)
        self._world.barrier()
        return found or {}

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, *_: object) -> None:
        if self._layers is not None:
            self._layers.close()
