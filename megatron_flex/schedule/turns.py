"""In which order the micro-batches enter the pipeline.

The order inside a global batch is free. Small micro-batches first let the last devices start
early, small ones last let the first devices finish early; large ones in between. The slices of a
chain follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_flex.schedule.costs import OpCosts

Turn = tuple[int, ...]


def turns(
    costs: OpCosts, pipeline: int, chains: Sequence[Sequence[int]] = ()
) -> Iterator[tuple[str, Turn]]:
    """Named orders of entry, most promising first.

    Args:
        pipeline: devices that a micro-batch passes through.
    """
    work = list(costs.totals)
    given, members = _leads(len(work), chains)
    for first, chain in members.items():
        work[first] = sum(work[m] for m in chain)

    def whole(order: Sequence[int]) -> Turn:
        return _whole(order, members)

    sizes = [work[m] for m in given]
    if max(sizes) <= min(sizes) * (1 + 1e-9):
        yield "given", whole(given)
        return
    up = sorted(given, key=lambda m: (work[m], m))
    seen: set[Turn] = set()
    for name, order in (
        ("small-ends", _ends(up, 2 * pipeline)),
        ("tent", up[0::2] + up[1::2][::-1]),
        ("ascending", up),
        ("small-ends-short", _ends(up, pipeline)),
        ("given", given),
        ("descending", up[::-1]),
    ):
        turn = whole(order)
        if turn not in seen:
            seen.add(turn)
            yield name, turn


def by_number(batches: int, chains: Sequence[Sequence[int]] = ()) -> Turn:
    """By number; a chain at the place of its first micro-batch."""
    return _whole(*_leads(batches, chains))


def _leads(
    batches: int, chains: Sequence[Sequence[int]]
) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """What enters on its own, by number, and the chains by their first micro-batch."""
    later = {m for chain in chains for m in chain[1:]}
    return [m for m in range(batches) if m not in later], {c[0]: tuple(c) for c in chains}


def _whole(order: Sequence[int], members: Mapping[int, tuple[int, ...]]) -> Turn:
    if not members:
        return tuple(order)
    return tuple(m for first in order for m in members.get(first, (first,)))


def _ends(up: list[int], count: int) -> list[int]:
    """The smallest first and last (``count`` at each end), the others ascending in between."""
    return up[:count] + up[2 * count :] + up[count : 2 * count][::-1]
