"""How slab states travel between devices and into host memory; :mod:`custody` waits for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # not the built-in in 3.10
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_flex.runtime.arena import ArenaTransport, Place
from megatron_flex.runtime.channel import Message
from megatron_flex.runtime.failure import CommunicationError
from megatron_flex.runtime.world import World, explain
from megatron_flex.schedule.instructions import (
    PieceOp,
    RecvPiece,
    RecvState,
    SendPiece,
    SendState,
    StateOp,
)
from megatron_flex.schedule.part import Part
from megatron_flex.twinlayer.errors import TwinError


class Pending(Protocol):
    """Something that has begun."""

    def wait(self) -> None:
        """Return when it is done; raises ``CommunicationError`` that names it."""


@dataclass(frozen=True)
class Awaited:
    """A message or a collective under way; ``what`` names it in errors."""

    what: object
    world: World
    work: Message

    def wait(self) -> None:
        """Return when it is done."""
        with explain(self.what, self.world):
            self.work.wait(self.world.timeout)


@dataclass(frozen=True)
class Copy:
    """A copy to or from the host's memory; ``what`` names it in errors."""

    what: object
    world: World
    future: Future[None]

    def wait(self) -> None:
        """Return when it is done."""
        seconds = self.world.timeout.total_seconds()
        try:
            self.future.result(seconds)
        except TwinError as error:
            if not isinstance(self.what, StateOp):
                raise
            raise CommunicationError(
                f"worker {self.world.process}: '{self.what}' through host memory failed: {error}"
            ) from error
        except FutureTimeoutError as error:
            raise CommunicationError(
                f"worker {self.world.process}: '{self.what}' was not done within {seconds:.0f} s"
            ) from error


class StateTransfers:
    """Begins transfers of slab states.

    What is handed over after the update goes through the host memory of the server where ``arena``
    has a place for it, everything else from worker to worker.
    """

    def __init__(self, world: World, arena: ArenaTransport | None = None) -> None:
        self._world = world
        self._arena = arena

    def prepare(self, part: Part, state_bytes: Callable[[int], int]) -> None:
        """Take places for what this worker hands over or is handed in an iteration."""
        if self._arena is not None:
            self._arena.prepare(part, state_bytes)

    @property
    def unready(self) -> bool:
        """Whether the places could not be taken; all workers must know at the global norm."""
        return self._arena is not None and not self._arena.ready()

    def agree(self, unready: bool) -> None:
        """After the global norm: whether any worker is :attr:`unready`."""
        if self._arena is not None:
            self._arena.open = not unready

    def send(self, op: SendState | SendPiece, state: torch.Tensor) -> Pending:
        """Begin to send; the state must not change before that is done."""
        place = self._place(op)
        if place is not None:
            return Copy(op, self._world, place.write(state))
        assert self._world.state is not None
        with explain(op, self._world):
            return Awaited(op, self._world, self._world.state.send(state, op.peer))

    def receive(self, op: RecvState | RecvPiece, state: torch.Tensor) -> Pending:
        """Begin to receive; the state is undefined before that is done."""
        place = self._place(op)
        if place is not None:
            return Copy(op, self._world, place.read(state))
        assert self._world.state is not None
        with explain(op, self._world):
            return Awaited(op, self._world, self._world.state.receive(state, op.peer))

    def _place(self, op: StateOp | PieceOp) -> Place | None:
        if self._arena is None or not isinstance(op, StateOp):
            return None
        return self._arena.place(op)
