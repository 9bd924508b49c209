"""From one plan to the next: which slabs move, from whom to whom, and in which way.

Three things can happen to a slab on a device. It *stays*. It is *dropped* (nothing moves: other
devices hold it). Or the device *joins*: another sends it the slab's weights and optimizer state,
either early, during the iteration, after which the joiner takes part in the gradient reduction
with a zero and applies the same update itself; or handed over after the update.

Where optimizer state is sharded, each holder owns a part of it (:mod:`shards`). Such a slab is *cut
anew*: whoever will own a part that it does not have gets the pieces early, from those who own them.
The joiners' parameters come by the gather that follows the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.shards import Cut, Owners, Range, cuts, missing
from megatron_flex.schedule.slabs import slab_holders


@dataclass(frozen=True, order=True)
class Move:
    """State of ``slab`` goes from ``source`` to ``target``, before the update if ``early``."""

    slab: int
    target: int
    source: int
    early: bool = True


@dataclass(frozen=True, order=True)
class Piece:
    """Optimizer state of elements ``[start, stop)`` of ``slab`` goes to ``target``, early."""

    slab: int
    target: int
    start: int
    stop: int
    source: int


@dataclass(frozen=True)
class Transition:
    """How the layout of an iteration becomes that of the next.

    Attributes:
        plan: of this iteration.
        next_plan: of the next.
        moves: in one global order (by slab, then target), which all devices follow.
        drops: for each slab, the devices that give it up.
        pieces: of slabs that are cut anew, in one global order.
        elements: padded elements of every slab; may be empty where nothing is cut.
    """

    plan: Plan
    next_plan: Plan
    moves: tuple[Move, ...]
    drops: tuple[tuple[int, ...], ...] = field(default=())
    pieces: tuple[Piece, ...] = ()
    elements: tuple[int, ...] = ()

    def cuts(self, layers: LayerList) -> dict[int, Cut]:
        """The slabs that are cut anew."""
        return cuts(self.plan, self.next_plan, layers, self.elements)

    @cached_property
    def joiners(self) -> dict[int, tuple[int, ...]]:
        """Slab -> devices that join early, ascending."""
        found: dict[int, list[int]] = {}
        for move in self.moves:
            if move.early:
                found.setdefault(move.slab, []).append(move.target)
        return {slab: tuple(sorted(targets)) for slab, targets in found.items()}


class Senders:
    """Who sends the state of a switch, in its price and in its execution.

    Of the devices that can, one of the target's own server; then the one that has least to send so
    far, then the lowest number.
    """

    def __init__(self, server_size: int) -> None:
        self._server_size = server_size
        self._load: dict[int, float] = {}

    def of(self, target: int, able: Sequence[int], size: float) -> int:
        """The device that sends ``size`` bytes to ``target``."""
        server = target // self._server_size
        near = [d for d in able if d // self._server_size == server] or able
        source = min(near, key=lambda d: (self._load.get(d, 0.0), d))
        self._load[source] = self._load.get(source, 0.0) + size
        return source


def transition(
    plan: Plan,
    next_plan: Plan,
    layers: LayerList,
    *,
    sizes: Sequence[float] = (),
    late: frozenset[tuple[int, int]] | None = frozenset(),
    server_size: int = 1 << 30,
    elements: Sequence[int] = (),
) -> Transition:
    """Work out who sends what to whom.

    Args:
        sizes: bytes of each slab's state, to spread the sending evenly; none: all equal.
        late: (slab, target) pairs that are handed over after the update (no room for an early
            copy); ``None``: all of them.
        server_size: devices of one server; a source on the target's own server is preferred.
        elements: padded elements of every slab; needed where sharded state is cut anew.

    A target's source is a device that holds the slab in ``plan``; among them one that keeps it is
    no better than one that drops it (:class:`Senders`).
    """
    before, after = slab_holders(plan, layers), slab_holders(next_plan, layers)
    senders = Senders(server_size)
    anew = cuts(plan, next_plan, layers, elements)
    moves, pieces = [], []
    for slab, (old, new) in enumerate(zip(before, after, strict=True)):
        size = sizes[slab] if sizes else 1.0
        if slab in anew:
            whole = max(1, elements[slab])
            for target, part in anew[slab].after.items():
                for start, stop, able in _parts(part, anew[slab].before, target):
                    source = senders.of(target, able, size * (stop - start) / whole)
                    pieces.append(Piece(slab, target, start, stop, source))
            continue
        for target in (d for d in new if d not in old):
            source = senders.of(target, old, size)
            early = late is not None and (slab, target) not in late
            moves.append(Move(slab, target, source, early))
    drops = tuple(
        tuple(d for d in old if d not in new) for old, new in zip(before, after, strict=True)
    )
    return Transition(plan, next_plan, tuple(moves), drops, tuple(pieces), tuple(elements))


def _parts(part: Range, before: Owners, target: int) -> Iterator[tuple[int, int, list[int]]]:
    """What ``target`` lacks of its part: start, stop, and the devices that own all of it."""
    for start, stop in missing(part, before.get(target)):
        ends = {e for own in before.values() for e in own if start < e < stop}
        for a, b in pairwise([start, *sorted(ends), stop]):
            yield a, b, [d for d, (first, last) in before.items() if first <= a and b <= last]
