"""Bytes of a model, unit by unit: parameters, gradients, optimizer state, activations.

Per device (docs/planner.md, ``M_peak = M_pgo + M_act + M_buf``, here for each device and not
in total):

* parameters in the model's type, gradients in float32, AdamW's two moments in float32, and float32
  master weights where the parameters are bfloat16: 16 bytes a parameter in float32, 18 in bfloat16;
* in flight: on each replica of stage s at most ``K_s`` micro-batches are between their forward and
  their backward (``K_s + 1`` with split backward), counted as the largest ones of any replica;
* the tied word embedding once on each device that holds the embedding or the head;
* one operation's transient memory at the largest micro-batch;
* send and receive buffers.

Activation bytes are closed forms of what the modules of ``megatron_flex/model`` save for their
backward (:mod:`megatron_flex.planner.passes`); a measured profile replaces them. What an iteration
takes on each device, instruction by instruction, is in :mod:`megatron_flex.planner.footprint`.

Where ranks share each layer (:mod:`megatron_flex.planner.tensor`) everything is of one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.model.tensor_cut import part_of
from megatron_flex.planner.passes import DTYPE_BYTES, passes
from megatron_flex.planner.tensor import ALONE, TensorParallel
from megatron_flex.schedule.shards import GRAIN, ROW, round_up

GRADIENT_BYTES = 4
MOMENT_BYTES = 8
MASTER_BYTES = 4
GRADIENT_LANES = 16
"""A row of gradients of keys is a multiple of so many numbers, the widest vector's."""


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


@dataclass(frozen=True)
class UnitMemory:
    """Memory of one unit.

    Attributes:
        state: its own slab (without a tied word embedding).
        activation: bytes that a forward leaves, a token, the unit's input among them.
        kept: bytes that are left, a token, when the unit is recomputed (its input); ``None`` where
            recompute is not possible (embedding and head).
        transient: bytes that a pass needs while it runs, a token.
        fixed: bytes that a pass needs besides, whatever its tokens: the gradients of tables. (Those
            of other weights are small beside the unit's state, and left out here.)
        owed: bytes that the input half of a split backward leaves for the weight half, a token.
    """

    state: StateBytes
    activation: float
    kept: float | None
    transient: float
    fixed: float = 0.0
    owed: float = 0.0


def parameter_sizes(config: ModelConfig, kind: Kind) -> tuple[int, ...]:
    """Elements of every parameter in one unit's own slab (see :func:`word_embedding_count`)."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    parts = 2 if config.normalization == "LayerNorm" else 1
    norm = (hidden,) * parts
    query = config.num_attention_heads * config.kv_channels
    qkv = query + 2 * config.num_query_groups * config.kv_channels

    def linear(inputs: int, outputs: int, bias: bool = config.add_bias_linear) -> tuple[int, ...]:
        return (inputs * outputs, outputs) if bias else (inputs * outputs,)

    if kind is Kind.ATTENTION:
        head_norms = (config.kv_channels,) * (2 * parts) if config.qk_layernorm else ()
        return (*norm, *linear(hidden, qkv, config.qkv_bias), *linear(query, hidden), *head_norms)
    if kind is Kind.MLP:
        wide = ffn * (2 if config.swiglu else 1)
        return (*norm, *linear(hidden, wide), *linear(ffn, hidden))
    if kind is Kind.EMBEDDING:
        learned = config.position_embedding_type == "learned_absolute"
        rows = (config.max_position_embeddings if learned else 0, config.num_tokentypes)
        return tuple(n * hidden for n in rows if n)
    if config.architecture != "bert":
        return norm
    # Transform (dense and norm) and the output layer's bias; then pooler and classifier.
    transform = (*linear(hidden, hidden, bias=True), *norm, config.padded_vocab_size)
    if not config.binary_head:
        return (*norm, *transform)
    return (*norm, *transform, *linear(hidden, hidden, bias=True), *linear(hidden, 2, bias=True))


def parameter_count(config: ModelConfig, kind: Kind) -> int:
    """Parameters of one unit's own slab; the word embedding is in :func:`word_embedding_count`."""
    return sum(parameter_sizes(config, kind))


def word_embedding_count(config: ModelConfig) -> int:
    """Parameters of one word embedding (tied: the shared slab; else one in each end unit)."""
    return config.padded_vocab_size * config.hidden_size


def slab_elements(config: ModelConfig, tensor: TensorParallel = ALONE) -> tuple[int, ...]:
    """Padded elements of every slab, as ``runtime/slab.py`` lays them out."""
    config = part_of(config, tensor.size)
    words = word_embedding_count(config)

    def padded(sizes: Sequence[int]) -> int:
        return round_up(sum(round_up(size, GRAIN) for size in sizes), ROW)

    found = []
    for unit in config.layers.units:
        end = unit.kind in (Kind.EMBEDDING, Kind.HEAD)
        own = (words,) if end and config.untie_embeddings_and_output_weights else ()
        found.append(padded((*own, *parameter_sizes(config, unit.kind))))
    return (*found, padded((words,))) if config.layers.tied else tuple(found)


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


def unit_memory(config: ModelConfig, tensor: TensorParallel = ALONE) -> Mapping[Kind, UnitMemory]:
    """Memory of one unit of each kind."""
    hidden, found_passes = boundary_bytes(config, tensor), passes(config, tensor)
    config = part_of(config, tensor.size)
    untied = word_embedding_count(config) if config.untie_embeddings_and_output_weights else 0
    found = {}
    for kind, unit in found_passes.items():
        end = kind in (Kind.EMBEDDING, Kind.HEAD)
        state = state_bytes(config, parameter_count(config, kind) + (untied if end else 0))
        # A backward begins with the gradient of the output; the head's is one number.
        output = 0.0 if kind is Kind.HEAD else hidden
        backward = output + max(level.token for level in unit.backward)
        forward = max(level.token for level in unit.forward) - unit.kept
        found[kind] = UnitMemory(
            state,
            0.0 if kind is Kind.EMBEDDING else hidden + unit.kept,
            None if end else hidden,
            max(forward, backward),
            max(level.fixed for level in unit.backward) if end else 0.0,
            unit.owed,
        )
    return found


def tied_state(config: ModelConfig, tensor: TensorParallel = ALONE) -> StateBytes:
    """Bytes of the tied word embedding on one device that holds it; zero when untied."""
    config = part_of(config, tensor.size)
    words = 0 if config.untie_embeddings_and_output_weights else word_embedding_count(config)
    return state_bytes(config, words)


@dataclass(frozen=True)
class ChainBytes:
    """Bytes a token of the whole sample that one attention unit holds of a sample cut to slices.

    Attributes:
        keys_values: from the forward of the first slice to its backward; where there is no backward
            to the forward of the last.
        gradients: of keys and values, from the backward of the last slice to that of the first.
    """

    keys_values: float
    gradients: float


def chain_bytes(config: ModelConfig, tensor: TensorParallel = ALONE) -> ChainBytes:
    """What one attention unit holds of a sample that is cut to slices (``model/prefix.py``)."""
    config = part_of(config, tensor.size)
    numbers = 2 * config.num_query_groups
    width = round_up(config.kv_channels, GRADIENT_LANES)
    size = DTYPE_BYTES[config.params_dtype]
    return ChainBytes(
        float(numbers * config.kv_channels * size), float(numbers * width * GRADIENT_BYTES)
    )


def boundary_bytes(config: ModelConfig, tensor: TensorParallel = ALONE) -> float:
    """Bytes of one token's activation between two stages."""
    return float(DTYPE_BYTES[config.params_dtype] * config.hidden_size) / tensor.shards
