"""The oracle: every cut of the elements over contiguous groups of devices, idle ones anywhere.

For tests and for ``--flexpipe-planner exhaustive`` on small jobs. It uses the readable definition
of the cost (:mod:`megatron_flex.planner.cost`), and none of the fast search's reasoning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from megatron_flex.planner.cost import Group, GroupCost, group_cost
from megatron_flex.planner.native_search import Cut
from megatron_flex.planner.tables import Tables

MAX_CUTS = 3_000_000
"""Cuts that are enumerated at most: 16 elements on 8 devices are 2.4 million."""


@dataclass(frozen=True)
class Block:
    """Elements ``[begin, end)`` on devices ``[first, last)``."""

    begin: int
    end: int
    first: int
    last: int


def count_cuts(elements: int, devices: int) -> int:
    """Number of cuts: of the elements times of the devices, for each number of groups."""
    return sum(
        math.comb(elements - 1, groups - 1) * math.comb(devices + groups, 2 * groups)
        for groups in range(1, min(elements, devices) + 1)
    )


def cuts(elements: int, devices: int, groups: int = 0) -> Iterator[tuple[Block, ...]]:
    """All cuts into at most ``groups`` groups (0: any number)."""

    def extend(done: tuple[Block, ...], begin: int, free: int) -> Iterator[tuple[Block, ...]]:
        if begin == elements:
            yield done
            return
        if groups and len(done) == groups:
            return
        for first in range(free, devices):
            for last in range(first + 1, devices + 1):
                for end in range(begin + 1, elements + 1):
                    yield from extend((*done, Block(begin, end, first, last)), end, last)

    return extend((), 0, 0)


def exhaustive(t: Tables, groups: int = 0) -> Cut | None:
    """The best cut of all; ``None`` when none fits. First in order of enumeration among equals.

    Raises:
        ValueError: when there are more than :data:`MAX_CUTS` cuts.
    """
    number = count_cuts(t.num_elements, t.num_devices)
    if number > MAX_CUTS:
        raise ValueError(
            f"{t.num_elements} elements on {t.num_devices} devices have {number} plans; the"
            f" exhaustive planner enumerates up to {MAX_CUTS}: use --flexpipe-planner lookahead, or"
            " --flexpipe-unit layer"
        )

    @cache
    def cost(block: Block) -> GroupCost:
        group = Group(((block.begin, block.end),), tuple(range(block.first, block.last)))
        return group_cost(t, group)

    best: tuple[Block, ...] | None = None
    best_cost, best_update = math.inf, 0.0
    for blocks in cuts(t.num_elements, t.num_devices, groups):
        worst, update = t.chain, 0.0
        for block in blocks:
            if block.last - block.first > t.num_micro_batches:
                worst = math.inf  # a replica without work
                break
            terms = cost(block)
            worst = max(worst, terms.seconds)
            update = max(update, terms.update)
            if worst + update >= best_cost + best_update:
                break
        if worst + update < best_cost + best_update:
            best, best_cost, best_update = blocks, worst, update
    if best is None:
        return None
    return Cut(
        tuple(Group(((b.begin, b.end),), tuple(range(b.first, b.last))) for b in best),
        best_cost,
        best_update,
    )
