"""Bytes that one pass of a unit takes while it runs, moment by moment.

What the modules of ``megatron_flex/model`` allocate and free on the CPU, in the order of autograd:
a node frees what it saved when it has run. The product that is a weight's gradient is added where
the sum is; in bfloat16 it is a buffer of its own first, and then one of float32. A test compares
every figure with the allocator's. On CUDA kernels differ a little; there the ratio of measured to
predicted peaks corrects the planner.

A micro-batch may hold a slice of a longer sample (``model/prefix.py``). Its keys and values are in
the unit's buffers, which :func:`megatron_flex.planner.memory.chain_bytes` counts, and not kept with
the micro-batch, and nothing keeps the projection's output alive; see :func:`slice_passes`.

Where ranks share each layer, bytes are those of one. With sequence parallelism it has the tokens of
its shard between the products, and those of all in them: inputs are gathered, and again in the
backward, and outputs are there whole until they are summed and divided.

A *level* is a number of bytes above those in use when the pass of the unit began: for a forward
without its input, for a backward with all that was kept and the gradient of the output in use, for
a weight half with what the input half left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.model.tensor_cut import part_of
from megatron_flex.planner.tensor import ALONE, TensorParallel

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Level:
    """``fixed + token * tokens + sliced * tokens of the slice`` bytes."""

    fixed: float
    token: float
    sliced: float = 0.0

    def __add__(self, other: Level) -> Level:
        return Level(self.fixed + other.fixed, self.token + other.token, self.sliced + other.sliced)

    def __call__(self, tokens: float, sliced: float = 0.0) -> float:
        """Bytes for a micro-batch, of whose tokens ``sliced`` are of a sample that is cut."""
        return self.fixed + self.token * tokens + self.sliced * sliced


@dataclass(frozen=True)
class Passes:
    """Memory of the passes of one unit.

    Attributes:
        kept: bytes a token that the forward leaves for the backward, without the unit's input
            (which is the output of the unit before it) and its output.
        forward: levels of the forward, its output included.
        unkept: levels of a forward that keeps nothing (the first one of a recomputed unit).
        backward: levels of the backward.
        owed: bytes a token that the input half of a split backward leaves for the weight half:
            inputs of linear layers and gradients of their outputs. That of the unit's own output
            is among them; with dropout it is a tensor apart.
        backward_input: levels of the input half.
        backward_weight: levels of the weight half, in its order.
        kept_sliced: bytes that the forward leaves besides, a token of the slice (less than none).
    """

    kept: float
    forward: tuple[Level, ...]
    unkept: tuple[Level, ...]
    backward: tuple[Level, ...]
    owed: float
    backward_input: tuple[Level, ...]
    backward_weight: tuple[Level, ...]
    kept_sliced: float = 0.0


def passes(config: ModelConfig, tensor: TensorParallel = ALONE) -> Mapping[Kind, Passes]:
    """Memory of the passes of one unit of each kind."""
    sizes = _Sizes(config, tensor)
    return {
        Kind.EMBEDDING: _embedding(sizes),
        Kind.ATTENTION: _attention(sizes),
        Kind.MLP: _mlp(sizes),
        Kind.HEAD: _head(sizes),
    }


def slice_passes(config: ModelConfig, tensor: TensorParallel = ALONE) -> Passes:
    """Memory of the passes of an attention unit where the micro-batch holds a slice.

    What the unit's buffers take is not counted.
    """
    s, whole = _Sizes(config, tensor), passes(config, tensor)[Kind.ATTENTION]
    grouped = 1 < s.config.num_query_groups < s.config.num_attention_heads
    if config.qk_layernorm:  # the norms keep the projection's output; the slice's keys are not kept
        spared, copied, sliced = 0.0, s.key_value / 2, s.key_value / 2
    else:  # queries (of groups they are already) and the other samples' keys and values are copied
        spared = s.query if grouped else 0.0
        copied, sliced = s.key_value + (0.0 if grouped else s.query), s.key_value
    kept, after = whole.kept - spared, s.bias_dropout_add

    def less(level: Level) -> Level:
        # What was kept is in use when the pass begins: as much as for whole samples when it ends.
        return Level(level.fixed, level.token + spared, level.sliced + sliced)

    # The projection's output is there until the unit's second product is; its copies already.
    scattered = (Level(0.0, kept + s.full + s.hidden, -sliced),) if s.divided else ()
    forward = (
        *scattered,
        Level(0.0, whole.kept + copied + s.full, -sliced),
        Level(0.0, kept + after, -sliced),
    )
    first, *rest = whole.backward[1:]
    gradient, *input_rest = whole.backward_input
    return Passes(
        kept,
        forward,
        whole.unkept,
        (whole.backward[0], first, *map(less, rest)),
        whole.owed,
        (gradient, *map(less, input_rest)),
        whole.backward_weight,
        -sliced,
    )


def slice_head(config: ModelConfig, tensor: TensorParallel = ALONE, *, alone: bool) -> Passes:
    """Memory of the passes of a head where the micro-batch holds a slice.

    Its backward runs in its forward, and the gradient of its input is all that is kept
    (``runtime/anticipate.py``). It takes the place of the input, unless the head is ``alone`` in
    its stage: what a stage received stays.
    """
    s, whole = _Sizes(config, tensor), passes(config, tensor)[Kind.HEAD]
    again = (Level(level.fixed, level.token + whole.kept) for level in whole.backward)
    nothing = Level(0.0, 0.0)
    forward = (*whole.forward, *again)
    kept = s.hidden if alone else 0.0
    return Passes(kept, forward, whole.unkept, (nothing,), 0.0, (nothing,), ())


class _Sizes:
    """Bytes a token of the tensors that the modules handle.

    ``hidden`` is what lies between the products, ``full`` what goes into them and comes out.
    """

    def __init__(self, config: ModelConfig, tensor: TensorParallel) -> None:
        shards = tensor.shards
        #: Layers are shared; what lies between the products is divided, too.
        self.shared, self.divided = tensor.size > 1, shards > 1
        self.config = config = part_of(config, tensor.size)
        self.element = DTYPE_BYTES[config.params_dtype]
        self.full = float(self.element * config.hidden_size)
        self.hidden = self.full / shards
        self.query = float(self.element * config.num_attention_heads * config.kv_channels)
        self.key_value = float(2 * self.element * config.num_query_groups * config.kv_channels)
        self.ffn = float(self.element * config.ffn_hidden_size)
        self.wide = self.ffn * (2 if config.swiglu else 1)
        self.norm = self.normed(config.hidden_size, 1) / shards
        drops = config.hidden_dropout > 0.0
        #: Gradient of what dropout was applied to; without dropout it is that of the output.
        self.dropped = self.hidden if drops else 0.0
        #: Gradients in the backward of a norm; RMSNorm's is a few operations in float32.
        layer_norm = config.normalization == "LayerNorm"
        self.norm_gradients = 2 * self.hidden if layer_norm else 16.0 * config.hidden_size / shards
        #: Numbers a token with which losses are made of logits, of all ranks where they are shared.
        self.losses = 12.0 * tensor.size + 8.0 if self.shared else 12.0
        #: A bias is added in a tensor of its own where no dropout kernel adds it.
        biased = config.add_bias_linear and not drops
        self.bias_dropout_add = self.hidden * (3 if biased else 2)
        #: The whole of a product's input, which is gathered again in the backward.
        self.gathered = self.full if self.divided else 0.0
        #: The gradient of a product's output where it is not that of the unit's.
        self.incoming = self.full if self.divided else self.dropped

    @property
    def added(self) -> tuple[Level, ...]:
        """The level while the last product is added to the residual, where nothing is kept.

        Other tensors of shared layers are narrower than these.
        """
        return (Level(0.0, self.hidden + self.bias_dropout_add),) if self.shared else ()

    def summed(self, kept: float) -> tuple[Level, ...]:
        """The level while the output of a unit's last product is divided into shards."""
        return (Level(0.0, kept + self.full + self.hidden),) if self.divided else ()

    def normed(self, width: int, rows: int) -> float:
        """What a norm of ``rows`` rows keeps besides its input: output, statistics, and with
        RMSNorm the values before they are scaled (in float32, as is the input then)."""
        output = self.element * width * rows
        if self.config.normalization == "LayerNorm":
            return float(output + 2 * self.element * rows)
        before = 4 * width * (1 if self.element == 4 else 2)
        return float(output + (before + 4) * rows)

    def gradient(self, elements: int, token: float = 0.0) -> Level:
        """The level while a weight's gradient is added to the float32 sum.

        Args:
            elements: of the weight.
            token: bytes a token in use besides.
        """
        return Level(0.0 if self.element == 4 else float(elements * (self.element + 4)), token)


def _attention(s: _Sizes) -> Passes:
    c = s.config
    heads, groups, width = c.num_attention_heads, c.num_query_groups, c.kv_channels
    qkv = s.query + s.key_value
    # Queries are views of the projection's output, unless those of several groups are in it.
    copied = s.query if 1 < groups < heads else 0.0
    head_norms = s.normed(width, heads) + s.normed(width, groups) if c.qk_layernorm else 0.0
    # Input of the projection, its output, the kernel's output, log-sum-exp in float32.
    kept = s.norm + qkv + copied + head_norms + s.query + 4 * heads
    # The same without statistics; normed queries take the place of copied ones.
    unkept = s.hidden + qkv + s.query + (
        s.query + s.key_value / 2 if c.qk_layernorm else copied
    )  # fmt: skip
    projection = c.hidden_size * (heads + 2 * groups) * width
    gone = s.query + copied + head_norms
    # RMSNorm's own gradients are more than this one, which comes first.
    residual = s.hidden if c.normalization == "LayerNorm" and not s.shared else 0.0
    output = c.hidden_size * heads * width
    backward = (
        s.gradient(output, s.incoming + s.query),
        Level(0.0, s.query + qkv),  # attention
        s.gradient(projection, s.full + s.gathered - gone),
        *s.summed(s.gathered - gone),
        *_norm_backward(s, residual - gone - qkv - s.query),
    )
    left = s.incoming + s.gathered - copied - head_norms
    return Passes(
        kept,
        (Level(0.0, kept + s.bias_dropout_add), *s.summed(kept)),
        (Level(0.0, unkept + s.full), *s.summed(unkept), *s.added),
        backward,
        2 * s.full + qkv + s.query,
        (
            Level(0.0, s.incoming + s.query + qkv),
            Level(0.0, left + s.norm_gradients + residual),
            *s.summed(left),
        ),
        (s.gradient(output), s.gradient(projection, -s.query - s.full)),
    )


def _norm_backward(s: _Sizes, rest: float) -> tuple[Level, ...]:
    """The level in the backward of a unit's norm, which is a high one where products are shared."""
    return (Level(0.0, s.norm_gradients - s.hidden + rest),) if s.shared else ()


def _mlp(s: _Sizes) -> Passes:
    c = s.config
    kept = s.norm + s.wide + s.ffn
    elements = c.hidden_size * c.ffn_hidden_size
    first = elements * (2 if c.swiglu else 1)
    backward = (
        s.gradient(elements, s.incoming + s.ffn),  # second product
        Level(0.0, s.wide),  # activation function
        s.gradient(first, s.full + s.gathered - s.ffn),  # first product
        *s.summed(s.gathered - s.ffn),
        *_norm_backward(s, -s.wide - s.ffn),
    )
    return Passes(
        kept,
        (Level(0.0, kept + s.bias_dropout_add), *s.summed(kept)),
        (Level(0.0, s.hidden + s.wide + s.ffn), *s.summed(s.hidden + s.ffn), *s.added),
        backward,
        2 * s.full + s.wide + s.ffn,
        (
            Level(0.0, s.incoming + s.ffn + s.wide),
            Level(0.0, s.incoming + s.gathered + s.norm_gradients),
            *s.summed(s.incoming + s.gathered),
        ),
        (s.gradient(elements), s.gradient(first, -s.ffn - s.full)),
    )


def _embedding(s: _Sizes) -> Passes:
    c = s.config
    added = c.position_embedding_type == "learned_absolute" or c.num_tokentypes > 0
    # Sums of rows are of all tokens, and divided at last.
    forward = Level(0.0, s.full * (3 if added else 2 if s.dropped and not s.divided else 1))
    forwards = (forward, *s.summed(0.0))
    # Rows are added to the tables' sums in float32.
    cast = 0.0 if s.element == 4 else 4.0 * c.hidden_size
    # Of a shared table those of its own words are taken out; the first rank may have most of them.
    chosen = s.full if s.shared else 0.0
    backward, half = Level(0.0, s.incoming + chosen + cast), Level(0.0, s.incoming + chosen)
    owed = s.full + (chosen if added else 0.0)
    kept = 9.0 if s.shared else 0.0  # which tokens they are
    return Passes(kept, forwards, forwards, (backward,), owed, (half,), (Level(0.0, cast),))


def _head(s: _Sizes) -> Passes:
    c = s.config
    logits, final = 4.0 * c.vocab_size, float(s.element * c.vocab_size)
    # Labels, log of the normalizer, which targets count.
    kept = s.norm + logits + 8 + 4 + 1
    if c.architecture == "bert":
        kept += 2 * s.hidden + s.norm  # dense, GELU, norm
    cast = final if s.element != 4 else 0.0  # logits before they are float32
    forward = Level(0.0, kept + cast + max(s.losses, s.gathered))
    output = c.vocab_size * c.hidden_size
    # The sentence-order head gives every token a gradient, most of them zero.
    pooled = s.hidden if c.binary_head else 0.0
    narrowed = cast - logits if cast else 0.0
    backward = (
        Level(0.0, pooled + cast),
        s.gradient(output, pooled + s.full + s.gathered + narrowed),  # output layer
        *s.summed(pooled + s.gathered + narrowed),
        Level(0.0, pooled + 2 * s.hidden - logits - s.norm),
        *_norm_backward(s, pooled - logits),
    )
    owed = s.full + (cast or logits)
    if c.architecture == "bert":
        owed += 2 * s.hidden  # dense
    inputs = (
        Level(0.0, pooled + cast),
        Level(0.0, pooled + s.full + s.gathered + narrowed),
        Level(0.0, pooled + s.gathered + s.norm_gradients + narrowed),
        *s.summed(pooled + s.gathered + narrowed),
    )
    return Passes(kept, (forward,), (forward,), backward, owed, inputs, (s.gradient(output),))
