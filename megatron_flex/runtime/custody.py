"""Where each slab of a device is in its life, and the one place that waits for what is on its way.

    absent ── receive ──► arriving ───► here ── drop ──► absent
    absent ── recut ────► being cut ──► here             a joiner's part, which comes in pieces
    here ──── recut ────► being cut ──► here             another part of its optimizer state
    here ──── gather ───► gathering ──► here             a sharded slab's parameters

What is done with a slab has it brought *here* first (:meth:`Custody.usable`), and what changes it
also waits for all who still read its state (:meth:`Custody.changeable`): who are sent it, and host
copies. Optimizer state that lives on the host goes in and out by ``swap``, and is at rest before it
is read. Instructions of a program and a switch between iterations come through here alike; any
other step is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

from megatron_flex.runtime.arena import ArenaTransport
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.slab import Slab
from megatron_flex.runtime.states import Awaited, Copy, Pending, StateTransfers
from megatron_flex.runtime.swap import OptimizerSwap
from megatron_flex.runtime.world import World, explain
from megatron_flex.schedule.instructions import (
    GatherParameters,
    Recut,
    RecvPiece,
    RecvState,
    SendPiece,
    SendState,
)


class State(Enum):
    """Where a slab is in its life on a device."""

    ABSENT = "absent"
    ARRIVING = "arriving"
    HERE = "here"
    CUT = "being cut anew"
    GATHERING = "gathering its parameters"


_AFTER = {
    State.ABSENT: {State.ARRIVING, State.CUT},
    State.ARRIVING: {State.HERE},
    State.HERE: {State.CUT, State.GATHERING, State.ABSENT},
    State.CUT: {State.HERE},
    State.GATHERING: {State.HERE},
}


@dataclass
class _Life:
    """What is under way with one slab.

    Attributes:
        state: where it is.
        coming: what must come before it is here.
        leaving: what reads its state.
        then: what waits for it to be here.
        part, target: its next part, and what pieces of that are received into.
    """

    state: State
    coming: list[Pending] = field(default_factory=list)
    leaving: list[Pending] = field(default_factory=list)
    then: Callable[[], None] | None = None
    part: Recut | None = None
    target: Slab | None = None


class Custody:
    """The slabs of one device, and what is on its way to them and from them.

    Attributes:
        carriers: what states travel by.
        swap: brings offloaded optimizer state to the device for its update.
    """

    def __init__(
        self, world: World, holdings: Holdings, arena: ArenaTransport | None = None
    ) -> None:
        """``arena`` carries what is handed over within a server; without it, messages do."""
        self._world = world
        self._holdings = holdings
        self.carriers = StateTransfers(world, arena)
        self.swap = OptimizerSwap(world.device)
        self._lives: dict[int, _Life] = {}

    def state(self, number: int) -> State:
        """Where a slab is."""
        if number in self._lives:
            return self._lives[number].state
        return State.HERE if number in self._holdings.slabs else State.ABSENT

    def _life(self, number: int) -> _Life:
        return self._lives.setdefault(number, _Life(self.state(number)))

    def _enter(self, number: int, state: State) -> _Life:
        """The next state of a slab's life."""
        life = self._life(number)
        if state not in _AFTER[life.state]:
            steps = f"cannot go from '{life.state.value}' to '{state.value}'"
            raise RuntimeError(f"worker {self._world.process}: slab {number} {steps}")
        life.state = state
        return life

    # ---- who waits ---------------------------------------------------------------------------

    def usable(self, number: int) -> bool:
        """Have a slab whose state or parameters are on their way here; whether they were."""
        life = self._lives.get(number)
        if life is None or life.state not in (State.ARRIVING, State.GATHERING):
            return False
        while life.coming:
            life.coming.pop(0).wait()
        if life.state is State.ARRIVING:
            self._holdings.slabs[number].params_from_masters()
        self._enter(number, State.HERE)
        then, life.then = life.then, None
        if then is not None:
            then()
        return True

    def leave(self, number: int, reader: Pending) -> None:
        """Something reads a slab's state from now on."""
        self._life(number).leaving.append(reader)

    def unread(self, number: int) -> None:
        """Wait until nobody reads a slab's state any more."""
        life = self._lives.get(number)
        while life is not None and life.leaving:
            life.leaving.pop(0).wait()

    def changeable(self, number: int) -> Slab:
        """The slab, when nothing of it is under way and it has the part that it is to have."""
        self.usable(number)
        life = self._lives.get(number)
        if life is not None and life.state is State.CUT:
            while life.coming:
                life.coming.pop(0).wait()
        self.unread(number)
        if life is not None and life.state is State.CUT:
            assert life.part is not None
            if life.target is None:
                self._holdings.cut(number, (life.part.start, life.part.stop))
            else:
                self._holdings.install(life.target)
            life.part = life.target = None
            self._enter(number, State.HERE)
        return self._holdings.slabs[number]

    def _at_rest(self, number: int) -> Slab:
        """The slab, when its optimizer state can be read."""
        self.usable(number)
        self.swap.settle()
        return self._holdings.slabs[number]

    def gathered(self) -> None:
        """Wait for all parameters that are being gathered."""
        for number, life in self._lives.items():
            if life.state is State.GATHERING:
                self.usable(number)

    def settle(self) -> None:
        """Wait for everything, before anything but a program uses the slabs."""
        for number in list(self._lives):
            self.changeable(number)
        self._lives.clear()

    # ---- the steps of a switch ---------------------------------------------------------------

    def receive(self, op: RecvState, *, offloaded: bool) -> None:
        """Make room for a slab and begin to receive it; ``offloaded``: into the host's memory."""
        life = self._enter(op.slab, State.ARRIVING)
        slab = self._holdings.join(op.slab, offloaded=offloaded)
        if slab.layout.numel:
            life.coming.append(self.carriers.receive(op, slab.state))

    def send(self, op: SendState) -> None:
        """Begin to send a slab's state."""
        if self._holdings.slabs[op.slab].layout.numel:
            state = self._at_rest(op.slab).state.to(self._world.device)
            self.leave(op.slab, self.carriers.send(op, state))

    def recut(self, op: Recut) -> None:
        """Make room for a part. A slab whose whole state is here is cut when it is changed."""
        part = op.start, op.stop
        if self.state(op.slab) is State.ABSENT:
            life = self._enter(op.slab, State.CUT)
            life.target = self._holdings.join(op.slab, part=part)
        else:
            slab = self._at_rest(op.slab)
            life = self._enter(op.slab, State.CUT)
            if slab.sharded:
                life.target = self._holdings.recut(op.slab, part)
        life.part = op

    def send_piece(self, op: SendPiece) -> None:
        """Begin to send a piece of the present part."""
        for tensor in self._at_rest(op.slab).piece(op.start, op.stop):
            self.leave(op.slab, self.carriers.send(op, tensor.to(self._world.device)))

    def receive_piece(self, op: RecvPiece) -> None:
        """Begin to receive a piece of the next part."""
        life = self._lives[op.slab]
        assert life.target is not None
        for tensor in life.target.piece(op.start, op.stop):
            life.coming.append(self.carriers.receive(op, tensor))

    def gather(self, op: GatherParameters) -> None:
        """Begin to gather a slab's parameters."""
        slab = self.changeable(op.slab)
        if slab.layout.numel:
            assert self._world.reductions is not None
            life = self._enter(op.slab, State.GATHERING)
            with explain(op, self._world):
                works = self._world.reductions.all_gather(slab.params, op.group)
            what = f"gathering the parameters of slab {op.slab}"
            life.coming += (Awaited(what, self._world, work) for work in works)

    def drop(self, number: int) -> None:
        """Give a slab up, when nothing of it is under way any more."""
        slab = self.changeable(number)
        self.swap.settle()
        slab.grads.zero_()
        self._enter(number, State.ABSENT)
        self._holdings.drop(number)
        del self._lives[number]

    # ---- the host ----------------------------------------------------------------------------

    def rehouse(self, number: int, *, offloaded: bool) -> None:
        """Have a slab's optimizer state in the host's memory, or on the device."""
        slab = self._holdings.slabs[number]
        offloaded = offloaded and slab.layout.numel > 0
        if slab.offloaded is not offloaded:
            self.changeable(number)
            self._holdings.rehouse(number, offloaded=offloaded)

    def copy(self, number: int, begin: Callable[[], Future[None]]) -> None:
        """Begin to copy a slab's state to the host, or do so when it has arrived."""
        life = self._life(number)

        def now() -> None:
            what = f"copy of slab {number} into host memory"
            self.leave(number, Copy(what, self._world, begin()))

        if life.state is State.ARRIVING:
            life.then = now
        else:
            now()

    def cut_anew(self, number: int) -> bool:
        """Whether a slab has another part, or another state, from its update on."""
        return self.state(number) is State.CUT
