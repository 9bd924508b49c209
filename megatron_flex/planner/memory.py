"""Bytes of a model, unit by unit: parameters, gradients, optimizer state, activations.

Per device (flexpipe.md section 5, ``M_peak = M_pgo + M_act + M_buf``, here for each device and not
in total):

* parameters in the model's type, gradients in float32, AdamW's two moments in float32, and float32
  master weights where the parameters are bfloat16: 16 bytes a parameter in float32, 18 in bfloat16;
* in flight: on each replica of stage s at most ``K_s`` micro-batches are between their forward and
  their backward (``K_s + 1`` with split backward), counted as the largest ones of any replica;
* the tied word embedding once on each device that holds the embedding or the head;
* one operation's transient memory at the largest micro-batch;
* send and receive buffers.

Activation bytes are closed forms of what the modules of ``megatron_flex/model`` save for their
backward (no dropout masks, no attention scores); a measured profile replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind

GRADIENT_BYTES = 4
MOMENT_BYTES = 8
MASTER_BYTES = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one slab on one device: parameters, gradients, optimizer state."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )


@dataclass(frozen=True)
class UnitMemory:
    """Memory of one unit.

    Attributes:
        state: its own slab (without a tied word embedding).
        activation: bytes that a forward leaves, a token.
        kept: bytes that are left, a token, when the unit is recomputed (its input); ``None`` where
            recompute is not possible (embedding and head).
        transient: bytes that a pass needs while it runs, a token.
    """

    state: StateBytes
    activation: float
    kept: float | None
    transient: float


def parameter_count(config: ModelConfig, kind: Kind) -> int:
    """Parameters of one unit's own slab; the word embedding is in :func:`word_embedding_count`."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    norm = hidden * (2 if config.normalization == "LayerNorm" else 1)
    query = config.num_attention_heads * config.kv_channels
    qkv = query + 2 * config.num_query_groups * config.kv_channels
    bias = 1 if config.add_bias_linear else 0
    if kind is Kind.ATTENTION:
        head_norms = 2 * config.kv_channels * (2 if config.normalization == "LayerNorm" else 1)
        return (
            norm
            + hidden * qkv + bias * qkv
            + query * hidden + bias * hidden
            + (head_norms if config.qk_layernorm else 0)
        )  # fmt: skip
    if kind is Kind.MLP:
        wide = ffn * (2 if config.swiglu else 1)
        return norm + hidden * wide + bias * wide + ffn * hidden + bias * hidden
    if kind is Kind.EMBEDDING:
        positions = (
            config.max_position_embeddings
            if config.position_embedding_type == "learned_absolute"
            else 0
        )
        return (positions + config.num_tokentypes) * hidden
    count = norm
    if config.architecture == "bert":
        # Transform (dense and norm) and the output layer's bias; then pooler and classifier.
        count += hidden * hidden + hidden + norm + config.padded_vocab_size
        if config.binary_head:
            count += hidden * hidden + hidden + 2 * hidden + 2
    return count


def word_embedding_count(config: ModelConfig) -> int:
    """Parameters of one word embedding (tied: the shared slab; else one in each end unit)."""
    return config.padded_vocab_size * config.hidden_size


def total_parameters(config: ModelConfig) -> int:
    """Parameters of the whole model, each counted once."""
    ends = parameter_count(config, Kind.EMBEDDING) + parameter_count(config, Kind.HEAD)
    layer = parameter_count(config, Kind.ATTENTION) + parameter_count(config, Kind.MLP)
    words = word_embedding_count(config)
    copies = 2 if config.untie_embeddings_and_output_weights else 1
    return ends + config.num_layers * layer + copies * words


def state_bytes(config: ModelConfig, parameters: int) -> StateBytes:
    """Bytes on one device of a slab with so many parameters."""
    size = DTYPE_BYTES[config.params_dtype]
    master = MASTER_BYTES if config.params_dtype != "float32" else 0
    return StateBytes(
        parameters * size, parameters * GRADIENT_BYTES, parameters * (MOMENT_BYTES + master)
    )


def unit_memory(config: ModelConfig) -> Mapping[Kind, UnitMemory]:
    """Memory of one unit of each kind."""
    size = DTYPE_BYTES[config.params_dtype]
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    query = config.num_attention_heads * config.kv_channels
    qkv = query + 2 * config.num_query_groups * config.kv_channels
    wide = ffn * (2 if config.swiglu else 1)
    untied = word_embedding_count(config) if config.untie_embeddings_and_output_weights else 0

    def state(kind: Kind, extra: int = 0) -> StateBytes:
        return state_bytes(config, parameter_count(config, kind) + extra)

    # Input and output of the norm; torch's RMSNorm also keeps the normed values before scaling.
    norm = size * hidden * (2 if config.normalization == "LayerNorm" else 3)
    # Queries, keys, values, rotated queries, attention's output, float32 log-sum-exp.
    rotated = query if config.position_embedding_type == "rope" else 0
    attention = norm + size * (qkv + rotated + query) + 4 * config.num_attention_heads
    # The product before and after the activation function.
    mlp = norm + size * (wide + ffn)
    # Float32 logits (the backward pass reuses them for their gradient).
    head = norm + 4 * config.vocab_size
    if config.architecture == "bert":
        head += size * 3 * hidden
    logits = size * config.vocab_size if config.params_dtype != "float32" else 0
    return {
        Kind.EMBEDDING: UnitMemory(state(Kind.EMBEDDING, untied), 0.0, None, float(size * hidden)),
        Kind.ATTENTION: UnitMemory(
            state(Kind.ATTENTION),
            float(attention),
            float(size * hidden),
            float(size * (qkv + query)),
        ),
        Kind.MLP: UnitMemory(
            state(Kind.MLP), float(mlp), float(size * hidden), float(size * (wide + ffn))
        ),
        Kind.HEAD: UnitMemory(state(Kind.HEAD, untied), float(head), None, float(logits)),
    }


def tied_state(config: ModelConfig) -> StateBytes:
    """Bytes of the tied word embedding on one device that holds it; zero when untied."""
    words = 0 if config.untie_embeddings_and_output_weights else word_embedding_count(config)
    return state_bytes(config, words)


def boundary_bytes(config: ModelConfig) -> float:
    """Bytes of one token's activation between two stages."""
    return float(DTYPE_BYTES[config.params_dtype] * config.hidden_size)
