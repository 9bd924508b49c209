"""In which order the micro-batches enter the pipeline.

The order inside a global batch is free. Small micro-batches first let the last devices start
early, small ones last let the first devices finish early; large ones in between.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_flex.schedule.costs import OpCosts

Turn = tuple[int, ...]


def turns(costs: OpCosts, pipeline: int) -> Iterator[tuple[str, Turn]]:
    """Named orders of entry, most promising first.

    Args:
        pipeline: devices that a micro-batch passes through.
    """
    batches = range(costs.num_micro_batches)
    work = [0.0] * len(batches)
    for stage in range(costs.num_stages):
        for micro_batch, seconds in enumerate(costs.stage_work(stage)):
            work[micro_batch] += seconds
    given = tuple(batches)
    if max(work) <= min(work) * (1 + 1e-9):
        yield "given", given
        return
    up = sorted(batches, key=lambda m: (work[m], m))
    seen: set[Turn] = set()
    for name, turn in (
        ("small-ends", _ends(up, 2 * pipeline)),
        ("tent", up[0::2] + up[1::2][::-1]),
        ("ascending", up),
        ("small-ends-short", _ends(up, pipeline)),
        ("given", list(given)),
        ("descending", up[::-1]),
    ):
        if tuple(turn) not in seen:
            seen.add(tuple(turn))
            yield name, tuple(turn)


def _ends(up: list[int], count: int) -> list[int]:
    """The smallest first and last (``count`` at each end), the others ascending in between."""
    return up[:count] + up[2 * count :] + up[count : 2 * count][::-1]
