"""Cutting one sample to slices: a chain that flows through the pipeline instead of blocking it.

A token attends to all tokens before it, so the slices of a sample are worth what their squares
differ by: of equal lengths the last would cost most.
"""

from __future__ import annotations

import math
from itertools import pairwise

from megatron_flex.data.microbatch import Slice
from megatron_flex.data.microbatches import CostCoefficients

GRANULE = 64
"""Slices of equal cost begin at multiples of so many tokens, which kernels like."""


def slices_of_tokens(sample: int, length: int, tokens: int) -> tuple[Slice, ...]:
    """Slices of ``tokens`` tokens each; the last has what is left."""
    starts = range(0, length, tokens)
    return tuple(Slice(sample, a, min(a + tokens, length), length) for a in starts)


def slices_of_cost(
    sample: int, length: int, limit: float, cost: CostCoefficients, granule: int = GRANULE
) -> tuple[Slice, ...]:
    """As few slices as cost at most ``limit`` each, of equal cost but for rounding to granules."""
    whole = cost.of(length)
    count = max(1, math.ceil(whole / limit - 1e-9))
    ends = [cost.tokens(whole * i / count) for i in range(1, count)]
    cuts = sorted({granule * round(end / granule) for end in ends} - {0})
    edges = [0, *(c for c in cuts if c < length), length]
    return tuple(Slice(sample, a, b, length) for a, b in pairwise(edges))
