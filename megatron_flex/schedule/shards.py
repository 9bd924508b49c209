"""Sharded optimizer state: which device owns which part of a slab.

The optimizer state of a sharded slab is split over the slab's holders (ZeRO-1, Megatron's
``--use-distributed-optimizer``). The ranges follow from the number of holders alone, so that all
workers, the validator and the memory model know them without a word. When the holders change, or a
slab begins or ceases to be sharded, the parts are cut anew: pieces travel from those who own them
to those who will.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.slabs import slab_holders

GRAIN = 32
"""Elements that are never split: a parameter's alignment in a slab."""
ROW = 1024
"""Elements to a multiple of which a slab is padded, so that its norm is a sum over equal rows."""

Range = tuple[int, int]
"""Elements ``[start, stop)`` of a slab."""
Owners = Mapping[int, Range]
"""Device -> its range of a slab. Holders of a slab that is not sharded own all of it."""


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not less."""
    return -(-value // multiple) * multiple


def share(numel: int, degree: int, place: int) -> Range:
    """The range of the holder number ``place`` of ``degree``; the last ones may own less."""
    part = -(-numel // (degree * GRAIN)) * GRAIN
    return min(numel, place * part), min(numel, (place + 1) * part)


def even(numel: int, degree: int) -> bool:
    """Whether all ranges have the same length, as collective operations want them."""
    return numel % (degree * GRAIN) == 0


def sharded_slabs(plan: Plan, layers: LayerList) -> frozenset[int]:
    """Slabs whose optimizer state is split under ``plan``: of several holders, and named by it.

    A tied word embedding goes with the embedding, whose unit is the first.
    """
    if not plan.o_plan.shard:
        return frozenset()
    named = set(plan.o_plan.shard)
    if layers.tied_slab is not None and 0 in named:
        named.add(layers.tied_slab)
    holders = slab_holders(plan, layers)
    return frozenset(slab for slab in named if len(holders[slab]) > 1)


def owners(holders: Sequence[int], numel: int, *, sharded: bool) -> dict[int, Range]:
    """Who owns what of one slab. ``holders`` ascend."""
    if not sharded:
        return dict.fromkeys(holders, (0, numel))
    return {d: share(numel, len(holders), place) for place, d in enumerate(holders)}


def missing(wanted: Range, has: Range | None) -> list[Range]:
    """The parts of ``wanted`` that are not in ``has``, ascending."""
    start, stop = wanted
    if start >= stop:
        return []
    if has is None or has[1] <= start or stop <= has[0]:
        return [wanted]
    parts = [(start, has[0]), (has[1], stop)]
    return [(a, b) for a, b in parts if a < b]


@dataclass(frozen=True)
class Cut:
    """A slab that is cut anew between two plans.

    Attributes:
        before, after: who owns what of its state; the holders in ascending order.
        sharded: whether it is sharded after.
    """

    before: Owners
    after: Owners
    sharded: bool

    @property
    def changed(self) -> tuple[int, ...]:
        """Devices with another part than before, ascending."""
        return tuple(d for d, part in self.after.items() if self.before.get(d) != part)


def cuts(plan: Plan, next_plan: Plan, layers: LayerList, elements: Sequence[int]) -> dict[int, Cut]:
    """The slabs that are cut anew, by number: sharded in one of the plans, and not alike in both.

    ``elements``: padded elements of every slab; may be empty where nothing is cut.
    """
    old, new = sharded_slabs(plan, layers), sharded_slabs(next_plan, layers)
    if not old and not new:
        return {}
    before, after = slab_holders(plan, layers), slab_holders(next_plan, layers)
    found = {}
    for slab in sorted(old | new):
        if before[slab] == after[slab] and (slab in old) is (slab in new):
            continue
        if not elements:
            raise ValueError(
                f"the optimizer state of slab {slab} is cut anew between '{plan}' and"
                f" '{next_plan}': give the number of elements of every slab"
            )
        found[slab] = Cut(
            owners(before[slab], elements[slab], sharded=slab in old),
            owners(after[slab], elements[slab], sharded=slab in new),
            slab in new,
        )
    return found
