"""The part of the validator that follows slab states through a switch of plans.

Each slab on each device has a version: the one from before this iteration's update, or the one
after it. Early copies must be of the first and be updated by the joiner like everybody else's;
copies that are handed over must be of the second and must not be updated again. A slab that is
being sent is neither updated nor dropped before its receiver has made room for it. At the end every
device has exactly what the next plan gives it, after the update. Sharded slabs have rules of their
own (:mod:`validate_shards`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from megatron_flex.model.layers import LayerList
from megatron_flex.schedule.instructions import (
    GatherParameters,
    GlobalNorm,
    PieceOp,
    Program,
    Recut,
    RecvPiece,
    RecvState,
    SendPiece,
    SendState,
    StateOp,
)
from megatron_flex.schedule.shards import Range
from megatron_flex.schedule.slabs import slab_holders
from tests.oracles.validate_shards import ShardReplay

#: States of a slab on a device.
OLD, NEW = "before the update", "after the update"


Content = tuple[int, Range | None]
"""What a message holds: a slab's state, or a part of it."""


def _content(op: StateOp | PieceOp) -> Content:
    return op.slab, (op.start, op.stop) if isinstance(op, PieceOp) else None


def _taken(sent: StateOp | PieceOp, device: int) -> StateOp | PieceOp:
    """What the receiver does with what ``device`` sent."""
    if isinstance(sent, PieceOp):
        return RecvPiece(sent.slab, device, sent.start, sent.stop)
    return RecvState(sent.slab, device)


def _named(content: Content) -> str:
    slab, part = content
    return f"slab {slab}" if part is None else f"elements {part[0]} to {part[1]} of slab {slab}"


class SwitchReplay:
    """Slab versions during the replay of a program.

    Args:
        stop: raises the error; takes the reason, and the device and step if they are not those of
            the instruction that is being replayed.

    Attributes:
        members: for each slab, the devices that reduce its gradient in this iteration: those of
            the plan, and those that join early.
        scattered: slabs of whose gradient each member gets its own part only.
    """

    def __init__(self, program: Program, layers: LayerList, stop: Callable[..., None]) -> None:
        self._stop = stop
        self._layers = layers
        self._switches = program.next_plan is not None
        now = slab_holders(program.held or program.plan, layers)
        after = now
        if program.next_plan is not None:
            program.next_plan.check(layers.num_units, len(program.instructions))
            after = slab_holders(program.next_plan, layers)
        self._next = tuple(map(frozenset, after))
        self._version = {(d, s): OLD for s, holders in enumerate(now) for d in holders}
        joined: dict[int, set[int]] = {}
        for device, steps in enumerate(program.instructions):
            for step in steps:
                if isinstance(step, GlobalNorm):
                    break
                if isinstance(step, RecvState):
                    joined.setdefault(step.slab, set()).add(device)
        self._shards = ShardReplay(program, layers, stop)
        for slab, cut in self._shards.cuts.items():
            joined.setdefault(slab, set()).update(cut.after)
        self.scattered = self._shards.scattered
        self.members = tuple(
            tuple(sorted({*holders, *joined.get(s, ())})) for s, holders in enumerate(now)
        )
        # Sent states that nobody has taken yet, by ordered pair; receives that wait, by device.
        self._sent: dict[tuple[int, int], deque[tuple[Content, str]]] = {}
        self._due: dict[tuple[int, int], deque[Content]] = {}
        # By (device, slab): version and sender of what is on its way there, receivers that have not
        # taken yet what is on its way from there.
        self._wanted: dict[tuple[int, int], tuple[str, int]] = {}
        self._leaving: dict[tuple[int, int], list[StateOp | PieceOp]] = {}
        self._waiting: dict[int, int] = {}  # device -> slab that it waits for

    # -- instructions --------------------------------------------------------------------------

    def send(self, device: int, op: SendState | SendPiece) -> int | None:
        """A state leaves; returns a device to be replayed again because it may wait for it."""
        self._check(op.slab)
        if not self.here(device, op.slab):
            self._stop(f"device {device} has no state of slab {op.slab} to send")
        self._shards.check_message(device, op)
        self._sent.setdefault((device, op.peer), deque()).append(
            (_content(op), self._version[device, op.slab])
        )
        self._leaving.setdefault((device, op.slab), []).append(op)
        self._match(device, op.peer)
        return self._woken(op.peer)

    def receive(self, device: int, op: RecvState | RecvPiece, *, late: bool) -> int | None:
        """Room is made for a state, and its arrival is awaited by what uses it.

        Returns a device to be replayed again because it may wait for the state to leave.
        """
        self._check(op.slab)
        self._shards.check_message(device, op)
        key = (device, op.slab)
        if isinstance(op, RecvState):
            if key in self._version or key in self._wanted:
                self._stop(f"device {device} has slab {op.slab} already")
            if device not in self._next[op.slab]:
                self._stop(f"the next plan does not give slab {op.slab} to device {device}")
            self._wanted[key] = (NEW if late else OLD, op.peer)
        self._due.setdefault((op.peer, device), deque()).append(_content(op))
        self._match(op.peer, device)
        return self._woken(op.peer)

    def recut(self, device: int, op: Recut) -> None:
        """Room is made for another part of a slab's optimizer state."""
        self._check(op.slab)
        self._shards.recut(device, op)

    def gather(self, device: int, op: GatherParameters) -> None:
        """The parameters of a sharded slab begin to be gathered."""
        self._shards.gather(device, op, self._version.get((device, op.slab)) is NEW)

    def update(self, device: int, slab: int) -> bool:
        """The update of a slab; ``False`` if its state is still on its way, to or from here."""
        if slab in self._shards.cuts:
            if not self._shards.whole(device, slab) or not self._left(device, slab):
                self._waiting[device] = slab
                return False
            self._version.setdefault((device, slab), OLD)
        if not self.here(device, slab) or not self._left(device, slab):
            return False
        if self._version[device, slab] is NEW:
            self._stop(f"slab {slab} came to device {device} after the update: it is updated twice")
        self._version[device, slab] = NEW
        return True

    def drop(self, device: int, slab: int) -> bool:
        """A slab is given up; ``False`` if its state is still on its way from here."""
        self._check(slab)
        if (device, slab) not in self._version:
            self._stop(f"device {device} has no slab {slab} to drop")
        if device in self._next[slab]:
            self._stop(f"slab {slab} is dropped, but the next plan gives it to device {device}")
        if not self._left(device, slab):
            return False
        del self._version[device, slab]
        return True

    def present(self, device: int, units: Iterable[int]) -> bool:
        """Whether a device can compute units; ``False`` if a state is still on its way."""
        for unit in units:
            for slab in self._layers.units[unit].slabs:
                if not self.here(device, slab):
                    return False
        return True

    def here(self, device: int, slab: int) -> bool:
        """Whether a state is there; ``False`` if it is on its way, an error if it never comes."""
        if (device, slab) in self._version:
            return True
        if (device, slab) not in self._wanted:
            self._stop(f"device {device} does not have slab {slab} (dropped, or not yet received)")
        self._waiting[device] = slab
        return False

    def waits(self, device: int) -> tuple[int, dict[int, StateOp | PieceOp]]:
        """The slab that a blocked device waits for, and what which devices must do for it."""
        slab = self._waiting[device]
        if (device, slab) in self._wanted:
            return slab, {self._wanted[device, slab][1]: SendState(slab, device)}
        pieces: dict[int, StateOp | PieceOp] = {
            source: SendPiece(content[0], device, *content[1])
            for (source, target), due in self._due.items()
            for content in due
            if target == device and content[0] == slab and content[1] is not None
        }
        if pieces:
            return slab, pieces
        return slab, {op.peer: _taken(op, device) for op in self._leaving[device, slab]}

    def finish(self) -> None:
        """Every device must have what the next plan gives it, after the update, and no more."""
        for slab, holders in enumerate(self._next):
            for device in sorted(holders):
                version = self._version.get((device, slab))
                if version is None:
                    how = "never arrives" if (device, slab) in self._wanted else "is not there"
                    self._stop(f"at the end slab {slab} {how}, which the next plan needs", device)
                if version is OLD:
                    self._stop(f"the list ends without an update of slab {slab}", device)
        self._shards.finish()
        for device, slab in sorted(self._version):
            if device not in self._next[slab]:
                self._stop(f"slab {slab} is kept, but the next plan does not need it", device)
        for (source, target), sent in sorted(self._sent.items()):
            if sent:
                self._stop(f"the state of {_named(sent[0][0])} is sent to device {target}, which"
                           " never receives it", source)  # fmt: skip

    # -- matching ------------------------------------------------------------------------------

    def _check(self, slab: int) -> None:
        if not self._switches:
            self._stop("a switch in a program without a next plan")
        if not 0 <= slab < len(self._next):
            self._stop(f"there are only slabs 0 to {len(self._next) - 1}")

    def _match(self, source: int, target: int) -> None:
        """Deliver what was both sent and asked for: first in, first out, as on the wire."""
        sent = self._sent.get((source, target))
        due = self._due.get((source, target))
        while sent and due:
            content, version = sent.popleft()
            wanted = due.popleft()
            if content != wanted:
                self._stop(f"out of order: device {source} sends {_named(content)}, device"
                           f" {target} expects {_named(wanted)}")  # fmt: skip
            slab, part = content
            expected = OLD
            if part is None:
                expected, _ = self._wanted.pop((target, slab))
            if version is not expected:
                self._stop(
                    f"stale state: {_named(content)} is sent {version}, device {target} takes it as"
                    f" it is {expected}"
                )
            if part is None:
                self._version[target, slab] = version
            else:
                self._shards.arrive(target, slab, part)
            leaving = self._leaving[source, slab]
            leaving.remove(next(o for o in leaving if (o.peer, _content(o)) == (target, content)))

    def _left(self, device: int, slab: int) -> bool:
        """Whether all copies of a slab that were sent from a device have been taken."""
        if self._leaving.get((device, slab)):
            self._waiting[device] = slab
            return False
        return True

    def _woken(self, device: int) -> int | None:
        """The device, if it was waiting."""
        return None if self._waiting.pop(device, None) is None else device
