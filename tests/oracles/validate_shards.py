"""The part of the validator that follows sharded optimizer state.

A device updates its own part of a sharded slab, and the parameters are gathered from all holders
after that, once, in one order on all members of a group. Where a slab is cut anew, every device
must make room for exactly the part that the next plan gives it, and have all of it, from devices
that own it now, before it updates the slab.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_flex.model.layers import LayerList
from megatron_flex.schedule.instructions import (
    GatherParameters,
    PieceOp,
    Program,
    Recut,
    RecvPiece,
    SendPiece,
    StateOp,
)
from megatron_flex.schedule.shards import Range, cuts, missing, sharded_slabs
from megatron_flex.schedule.slabs import slab_holders


class ShardReplay:
    """Parts of sharded slabs during the replay of a program.

    Args:
        stop: raises the error; takes the reason, and the device if it is not the one replayed.

    Attributes:
        cuts: slabs that are cut anew.
        scattered: slabs that stay as they are sharded.
    """

    def __init__(self, program: Program, layers: LayerList, stop: Callable[..., None]) -> None:
        self._stop = stop
        now = program.held or program.plan
        after = program.next_plan or now
        self.cuts = cuts(now, after, layers, program.elements)
        self.scattered = sharded_slabs(now, layers) - self.cuts.keys()
        holders = slab_holders(after, layers) if self.scattered else ()
        self._groups = {slab: holders[slab] for slab in self.scattered} | {
            slab: tuple(cut.after) for slab, cut in self.cuts.items() if cut.sharded
        }
        self._rooms: dict[tuple[int, int], Range] = {}  # by (device, slab)
        self._lacks: dict[tuple[int, int], list[Range]] = {}  # parts that have not arrived
        self._asked: dict[tuple[int, int], list[Range]] = {}  # parts that are asked for
        self._order: dict[tuple[int, ...], list[int]] = {}  # slabs gathered in a group
        self._gathered: dict[int, dict[tuple[int, ...], int]] = {}  # device -> group -> how many
        self._done: set[tuple[int, int]] = set()

    def check_message(self, device: int, op: StateOp | PieceOp) -> None:
        """Sharded slabs travel in pieces, all others whole."""
        if not isinstance(op, PieceOp):
            if op.slab in self.cuts or op.slab in self.scattered:
                self._stop(f"slab {op.slab} is sharded: its state travels in pieces")
            return
        cut = self.cuts.get(op.slab)
        if cut is None:
            self._stop(f"slab {op.slab} is not cut anew: no pieces of it travel")
            return
        if isinstance(op, SendPiece):
            own = cut.before.get(device)
            if own is None or op.start >= op.stop or missing((op.start, op.stop), own):
                self._stop(f"device {device} owns {_part(own)} of slab {op.slab} before the update")
        elif isinstance(op, RecvPiece):
            asked = self._asked.get((device, op.slab))
            if asked is None:
                self._stop(f"device {device} has not made room for a new part of slab {op.slab}")
            elif (piece := _containing(asked, (op.start, op.stop))) is None:
                self._stop(f"device {device} does not lack this piece of slab {op.slab}")
            else:
                _take(asked, piece, (op.start, op.stop))

    def recut(self, device: int, op: Recut) -> None:
        """Room for another part."""
        cut = self.cuts.get(op.slab)
        if cut is None or device not in cut.changed:
            self._stop(f"device {device} keeps its part of slab {op.slab}")
            return
        if (device, op.slab) in self._rooms:
            self._stop(f"slab {op.slab} is cut anew a second time")
        if cut.after[device] != (op.start, op.stop):
            self._stop(f"wrong part: the next plan gives {_part(cut.after[device])} of slab"
                       f" {op.slab} to device {device}")  # fmt: skip
        self._rooms[device, op.slab] = (op.start, op.stop)
        lacks = missing((op.start, op.stop), cut.before.get(device))
        self._lacks[device, op.slab] = lacks
        self._asked[device, op.slab] = list(lacks)

    def arrive(self, device: int, slab: int, piece: Range) -> None:
        """A piece that was asked for is there."""
        lacks = self._lacks[device, slab]
        whole = _containing(lacks, piece)
        assert whole is not None  # it was asked for
        _take(lacks, whole, piece)

    def whole(self, device: int, slab: int) -> bool:
        """Whether a device has its next part; ``False`` if pieces are on their way."""
        cut = self.cuts[slab]
        if device not in cut.after:
            self._stop(f"device {device} gives up its part of slab {slab}: others update it")
        if device in cut.changed and (device, slab) not in self._rooms:
            self._stop(f"device {device} has not made room for its new part of slab {slab},"
                       f" {_part(cut.after[device])}")  # fmt: skip
        asked = self._asked.get((device, slab))
        if asked:
            self._stop(f"device {device} lacks {_part(asked[0])} of slab {slab}, and has not asked"
                       " for it")  # fmt: skip
        return not self._lacks.get((device, slab))

    def gather(self, device: int, op: GatherParameters, updated: bool) -> None:
        """Parameters are gathered; ``updated``: this device's part is."""
        group = self._groups.get(op.slab)
        if group is None:
            self._stop(f"slab {op.slab} is not sharded after this iteration: nothing to gather")
            return
        if group != op.group:
            self._stop(f"wrong group: slab {op.slab} is held by devices"
                       f" {', '.join(map(str, group))} then")  # fmt: skip
        if not updated:
            self._stop(f"the parameters of slab {op.slab} are gathered before its update")
        if (device, op.slab) in self._done:
            self._stop(f"the parameters of slab {op.slab} are gathered a second time")
        self._done.add((device, op.slab))
        counts = self._gathered.setdefault(device, {})
        number = counts.get(group, 0)
        counts[group] = number + 1
        order = self._order.setdefault(group, [])
        if number == len(order):
            order.append(op.slab)
        elif order[number] != op.slab:
            self._stop(f"out of order: other members of the group gather slab {order[number]}"
                       " at this place")  # fmt: skip

    def finish(self) -> None:
        """All parameters must be gathered."""
        for slab, group in sorted(self._groups.items()):
            for device in group:
                if (device, slab) not in self._done:
                    self._stop(f"the list ends without gathering the parameters of slab {slab}",
                               device)  # fmt: skip


def _part(part: Range | None) -> str:
    return "nothing" if part is None else f"elements {part[0]} to {part[1]}"


def _containing(parts: list[Range], piece: Range) -> Range | None:
    start, stop = piece
    return next((p for p in parts if p[0] <= start < stop <= p[1]), None)


def _take(parts: list[Range], whole: Range, piece: Range) -> None:
    """Take ``piece`` out of ``whole``, one of ``parts``."""
    parts.remove(whole)
    ends = [(whole[0], piece[0]), (piece[1], whole[1])]
    parts.extend((a, b) for a, b in ends if a < b)
