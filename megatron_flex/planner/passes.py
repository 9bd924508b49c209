"""Bytes that one pass of a unit takes while it runs, moment by moment.

What the modules of ``megatron_flex/model`` allocate and free on the CPU, in the order of autograd:
a node frees what it saved when it has run, and the gradient of a weight is a buffer of its own
until it is added. A test compares every figure with the allocator's. On CUDA kernels differ a
little; there the ratio of measured to predicted peaks corrects the planner.

A *level* is a number of bytes above those in use when the pass of the unit began: for a forward
without its input, for a backward with all that was kept and the gradient of the output in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Level:
    """``fixed + token * tokens`` bytes."""

    fixed: float
    token: float

    def __call__(self, tokens: float) -> float:
        """Bytes for a micro-batch."""
        return self.fixed + self.token * tokens


@dataclass(frozen=True)
class Passes:
    """Memory of the passes of one unit.

    Attributes:
        kept: bytes a token that the forward leaves for the backward, without the unit's input
            (which is the output of the unit before it) and its output.
        forward: levels of the forward, its output included.
        unkept: levels of a forward that keeps nothing (the first one of a recomputed unit).
        backward: levels of the backward.
    """

    kept: float
    forward: tuple[Level, ...]
    unkept: tuple[Level, ...]
    backward: tuple[Level, ...]


def highest(levels: tuple[Level, ...], tokens: float) -> float:
    """The highest of some levels."""
    return max(level(tokens) for level in levels)


def passes(config: ModelConfig) -> Mapping[Kind, Passes]:
    """Memory of the passes of one unit of each kind."""
    sizes = _Sizes(config)
    return {
        Kind.EMBEDDING: _embedding(sizes),
        Kind.ATTENTION: _attention(sizes),
        Kind.MLP: _mlp(sizes),
        Kind.HEAD: _head(sizes),
    }


class _Sizes:
    """Bytes a token of the tensors that the modules handle."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.element = DTYPE_BYTES[config.params_dtype]
        self.hidden = float(self.element * config.hidden_size)
        self.query = float(self.element * config.num_attention_heads * config.kv_channels)
        self.key_value = float(2 * self.element * config.num_query_groups * config.kv_channels)
        self.ffn = float(self.element * config.ffn_hidden_size)
        self.wide = self.ffn * (2 if config.swiglu else 1)
        self.norm = self.normed(config.hidden_size, 1)
        drops = config.hidden_dropout > 0.0
        #: Gradient of what dropout was applied to; without dropout it is that of the output.
        self.dropped = self.hidden if drops else 0.0
        #: A bias is added in a tensor of its own where no dropout kernel adds it.
        biased = config.add_bias_linear and not drops
        self.bias_dropout_add = self.hidden * (3 if biased else 2)

    def normed(self, width: int, rows: int) -> float:
        """What a norm of ``rows`` rows keeps besides its input: output, statistics, and with
        RMSNorm the values before they are scaled (in float32, as is the input then)."""
        output = self.element * width * rows
        if self.config.normalization == "LayerNorm":
            return float(output + 2 * self.element * rows)
        before = 4 * width * (1 if self.element == 4 else 2)
        return float(output + (before + 4) * rows)

    def gradient(self, elements: int, token: float, freed: float = 0.0) -> tuple[Level, ...]:
        """Levels while a weight's gradient is made and added to the float32 sum.

        Args:
            elements: of the weight.
            token: bytes a token in use besides, while it is made.
            freed: bytes a token that have gone when it is cast to float32, if it has to be.
        """
        made = Level(float(elements * self.element), token)
        if self.element == 4:
            return (made,)
        return made, Level(float(elements * (self.element + 4)), token - freed)


def _attention(s: _Sizes) -> Passes:
    c = s.config
    heads, groups, width = c.num_attention_heads, c.num_query_groups, c.kv_channels
    qkv = s.query + s.key_value
    # Queries are views of the projection's output, unless heads share keys: then they are copied.
    copied = s.query if groups < heads else 0.0
    head_norms = s.normed(width, heads) + s.normed(width, groups) if c.qk_layernorm else 0.0
    # Input of the projection, its output, the kernel's output, log-sum-exp in float32.
    kept = s.norm + qkv + copied + head_norms + s.query + 4 * heads
    # The same without statistics; normed queries take the place of copied ones.
    unkept = s.hidden + qkv + s.query + (
        s.query + s.key_value / 2 if c.qk_layernorm else copied
    )  # fmt: skip
    projection = c.hidden_size * (heads + 2 * groups) * width
    gone = s.query + copied + head_norms
    backward = (
        *s.gradient(c.hidden_size * heads * width, s.dropped + s.query, s.dropped),  # output
        Level(0.0, s.query + qkv),  # attention
        *s.gradient(projection, s.hidden - gone, qkv + s.hidden),  # queries, keys, values
    )
    return Passes(
        kept,
        (Level(0.0, kept + s.bias_dropout_add),),
        (Level(0.0, unkept + s.hidden),),
        backward,
    )


def _mlp(s: _Sizes) -> Passes:
    c = s.config
    kept = s.norm + s.wide + s.ffn
    elements = c.hidden_size * c.ffn_hidden_size
    first = elements * (2 if c.swiglu else 1)
    backward = (
        *s.gradient(elements, s.dropped + s.ffn, s.dropped + s.ffn),  # second product
        Level(0.0, s.wide),  # activation function
        *s.gradient(first, s.hidden - s.ffn, s.wide + s.hidden),  # first product
    )
    return Passes(
        kept,
        (Level(0.0, kept + s.bias_dropout_add),),
        (Level(0.0, s.hidden + s.wide + s.ffn),),
        backward,
    )


def _embedding(s: _Sizes) -> Passes:
    c = s.config
    added = c.position_embedding_type == "learned_absolute" or c.num_tokentypes > 0
    forward = Level(0.0, s.hidden * (3 if added else 2 if s.dropped else 1))
    # The gradient of a table is as large as the table.
    rows = [c.padded_vocab_size, c.num_tokentypes]
    if c.position_embedding_type == "learned_absolute":
        rows.append(c.max_position_embeddings)
    return Passes(0.0, (forward,), (forward,), s.gradient(max(rows) * c.hidden_size, s.dropped))


def _head(s: _Sizes) -> Passes:
    c = s.config
    logits, final = 4.0 * c.vocab_size, float(s.element * c.vocab_size)
    # Labels, log of the normalizer, which targets count.
    kept = s.norm + logits + 8 + 4 + 1
    if c.architecture == "bert":
        kept += 2 * s.hidden + s.norm  # dense, GELU, norm
    cast = final if s.element != 4 else 0.0  # logits before they are float32
    forward = Level(0.0, kept + cast + 12)
    output, table = c.vocab_size * c.hidden_size, c.padded_vocab_size * c.hidden_size
    # The sentence-order head gives every token a gradient, most of them zero.
    pooled = s.hidden if c.binary_head else 0.0
    narrowed = cast - logits if cast else 0.0
    # The gradient of the used rows is put into one of all rows.
    whole = s.gradient(table, pooled - logits - 13)[-1]
    backward = (
        Level(0.0, pooled + cast),
        Level(float(s.element * output), pooled + s.hidden + narrowed),  # output layer
        Level(whole.fixed + s.element * output, whole.token),
        Level(0.0, pooled + 2 * s.hidden - logits - s.norm),
    )
    return Passes(kept, (forward,), (forward,), backward)
