"""What a layer asks of its attention kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionOptions:
    """The same for every micro-batch.

    Attributes:
        layer: 0-based layer, part of the key of attention dropout.
        causal: a token sees itself and earlier tokens of its sample; else the whole sample.
        scale: factor of the scores.
        dropout: probability of the mask keyed by (seed, sample, layer, head, query, key position).
        rotary: rotate queries and keys by ``PackedContext.rotary``.
        first_head: the layer's number of the first head here, in its key of attention dropout.
    """

    layer: int
    causal: bool
    scale: float
    dropout: float
    rotary: bool
    first_head: int = 0
