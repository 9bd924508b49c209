"""Closed-form work of each unit, from the model's shape alone.

The work of a unit on one micro-batch is ``linear * tokens + quadratic * squares`` floating-point
operations (a multiply-add counts as two), where ``squares`` is
:attr:`megatron_flex.data.microbatch.MicroBatch.squares`, the sum of the squared sample lengths.
The backward pass costs twice the forward pass, half of it for the gradient of the input and half
for that of the weights (attention scores have no weights: all of their backward is input
gradient).

Only matrix products are counted. Look-ups, norms, activations and dropout are bound by memory
traffic and are measured by a profile (``megatron_flex/cluster/profile.py``) where they matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind

BACKWARD_RATIO = 2.0
"""Backward FLOPs over forward FLOPs of every unit."""


@dataclass(frozen=True)
class UnitWork:
    """Forward FLOPs of one unit: ``linear`` a token, ``quadratic`` a token pair.

    A token pair is one entry of ``squares``; a causal mask computes half of them, and that half
    is already in ``quadratic``.
    """

    linear: float
    quadratic: float

    def forward(self, tokens: float, squares: float) -> float:
        """FLOPs of the forward pass of a micro-batch."""
        return self.linear * tokens + self.quadratic * squares


def kind_work(config: ModelConfig, kind: Kind) -> UnitWork:
    """Work of one unit of ``kind``.

    Attention: the products with the query, key, value and output weights (grouped queries shrink
    key and value), and the two products over token pairs. MLP: two products, three with SwiGLU.
    Head: the product with the vocabulary (padded rows take no part), for BERT also the dense layer
    in front of it. The embedding is a look-up: zero.
    """
    hidden = config.hidden_size
    query = config.num_attention_heads * config.kv_channels
    key_value = config.num_query_groups * config.kv_channels
    if kind is Kind.ATTENTION:
        pairs = 0.5 if config.causal else 1.0
        return UnitWork(2.0 * hidden * (2 * query + 2 * key_value), 4.0 * query * pairs)
    if kind is Kind.MLP:
        return UnitWork(2.0 * hidden * config.ffn_hidden_size * (3 if config.swiglu else 2), 0.0)
    if kind is Kind.HEAD:
        dense = hidden if config.architecture == "bert" else 0
        return UnitWork(2.0 * hidden * (config.vocab_size + dense), 0.0)
    return UnitWork(0.0, 0.0)


def model_work(config: ModelConfig) -> tuple[UnitWork, ...]:
    """Work of every unit of the layer list, in order."""
    kinds = {kind: kind_work(config, kind) for kind in Kind}
    return tuple(kinds[unit.kind] for unit in config.layers.units)


def total_work(works: Sequence[UnitWork]) -> UnitWork:
    """Work of all given units together."""
    return UnitWork(sum(w.linear for w in works), sum(w.quadratic for w in works))


def iteration_flops(config: ModelConfig, tokens: float, squares: float) -> float:
    """Model FLOPs (forward and backward, without recompute) of ``tokens`` tokens.

    What throughput per GPU and MFU are computed from: only real tokens, and attention at the
    samples' own lengths.
    """
    work = total_work(model_work(config))
    return (1.0 + BACKWARD_RATIO) * work.forward(tokens, squares)


def cost_coefficients(config: ModelConfig) -> CostCoefficients:
    """What a sample costs, for cutting micro-batches: FLOPs, normalised to 1 a token.

    Fixed for a run and kept in the checkpoint, so that a resumed run cuts alike.
    """
    work = total_work(model_work(config))
    return CostCoefficients(1.0, work.quadratic / work.linear)
