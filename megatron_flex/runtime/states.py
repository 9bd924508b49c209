"""Slab states on their way between devices, or into host memory, and who waits for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # not the built-in in 3.10
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_flex.runtime.arena import ArenaTransport
from megatron_flex.runtime.channel import Message
from megatron_flex.runtime.communicator import explain
from megatron_flex.runtime.failure import CommunicationError
from megatron_flex.runtime.world import World
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


class Transport(Protocol):
    """Carries the state of slabs from device to device. Nothing blocks."""

    def send(self, op: SendState, state: torch.Tensor) -> Pending:
        """Begin to send; ``state`` must not change before that is done."""

    def receive(self, op: RecvState, state: torch.Tensor) -> Pending:
        """Begin to receive; ``state`` is undefined before that is done."""


@dataclass(frozen=True)
class _Message:
    op: StateOp | PieceOp
    world: World
    work: Message

    def wait(self) -> None:
        with explain(self.op, self.world):
            self.work.wait(self.world.timeout)


@dataclass(frozen=True)
class PeerTransport:
    """From worker to worker, as messages of torch.distributed."""

    world: World

    def send(self, op: SendState | SendPiece, state: torch.Tensor) -> Pending:
        """Begin to send."""
        assert self.world.state is not None
        with explain(op, self.world):
            return _Message(op, self.world, self.world.state.send(state, op.peer))

    def receive(self, op: RecvState | RecvPiece, state: torch.Tensor) -> Pending:
        """Begin to receive."""
        assert self.world.state is not None
        with explain(op, self.world):
            return _Message(op, self.world, self.world.state.receive(state, op.peer))


@dataclass(frozen=True)
class _Copy:
    what: object
    world: World
    future: Future[None]

    def wait(self) -> None:
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
    """Slab states on their way, waited for by whatever needs the slab next.

    What is handed over after the update goes through the host memory of the server where ``arena``
    has a place for it, everything else from worker to worker.
    """

    def __init__(self, world: World, arena: ArenaTransport | None = None) -> None:
        self._world = world
        self._peers = PeerTransport(world)
        self._arena = arena
        self._arriving: dict[int, Pending] = {}
        self._leaving: dict[int, list[Pending]] = {}
        self._on_arrival: dict[int, Callable[[], None]] = {}

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

    def send(self, op: SendState, state: torch.Tensor) -> None:
        """Begin to send; the state must not change before :meth:`left`."""
        place = None if self._arena is None else self._arena.place(op)
        if place is None:
            self.leave(op.slab, self._peers.send(op, state))
        else:
            self.leave(op.slab, _Copy(op, self._world, place.write(state)))

    def receive(self, op: RecvState, state: torch.Tensor) -> None:
        """Begin to receive; the state is undefined before :meth:`arrived`."""
        place = None if self._arena is None else self._arena.place(op)
        if place is None:
            self._arriving[op.slab] = self._peers.receive(op, state)
        else:
            self._arriving[op.slab] = _Copy(op, self._world, place.read(state))

    def copy(self, slab: int, begin: Callable[[], Future[None]]) -> None:
        """Begin to copy a slab's state, or do so when it has arrived; :meth:`left` waits for it."""

        def now() -> None:
            what = f"copy of slab {slab} into host memory"
            self.leave(slab, _Copy(what, self._world, begin()))

        if slab in self._arriving:
            self._on_arrival[slab] = now
        else:
            now()

    def arrived(self, slab: int) -> bool:
        """Wait for a slab that is on its way here; whether it was."""
        pending = self._arriving.pop(slab, None)
        if pending is None:
            return False
        pending.wait()
        self._on_arrival.pop(slab, lambda: None)()
        return True

    def left(self, slab: int) -> None:
        """Wait until all copies of a slab that were being sent have left."""
        for pending in self._leaving.pop(slab, ()):
            pending.wait()

    @property
    def arriving(self) -> tuple[int, ...]:
        """Slabs on their way here."""
        return tuple(self._arriving)

    @property
    def leaving(self) -> tuple[int, ...]:
        """Slabs on their way from here."""
        return tuple(self._leaving)

    def leave(self, slab: int, pending: Pending) -> None:
        """Something of a slab is on its way from here."""
        self._leaving.setdefault(slab, []).append(pending)
