"""Names and shapes of all weights of a model, to find what is missing or of another model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megatron_flex.checkpoint.conversion.optimizer import kinds_of
from megatron_flex.checkpoint.conversion.weights import (
    OUTPUT_LAYER,
    WORD_EMBEDDING,
    Weights,
    state_name,
)
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.lazy import forms_of
from megatron_flex.model.config import ModelConfig

Shape = tuple[int, ...]


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Megatron's parameter name (local layer specification) -> shape, for the whole model."""
    return dict(_shapes(config))


def tensor_shapes(weights: Weights) -> dict[str, Shape]:
    """The same with the optimizer's state, where that belongs to the weights."""
    shapes = weight_shapes(weights.config)
    return shapes if weights.training is None else with_state(shapes, weights.config)


def with_state(shapes: Mapping[str, Shape], config: ModelConfig) -> dict[str, Shape]:
    """Shapes of parameters and of their optimizer state."""
    state = {
        state_name(kind, name): shape for kind in kinds_of(config) for name, shape in shapes.items()
    }
    return {**shapes, **state}


def check_weights(weights: Weights) -> None:
    """Raise :class:`CheckpointError` unless the weights are exactly those of their model."""
    expected, forms = tensor_shapes(weights), forms_of(weights.tensors)
    for name in sorted({*expected, *forms}):
        if name not in forms:
            raise CheckpointError(f"the weights lack {name}, which the model's shape asks for")
        check_weight(name, forms[name], expected)


def check_weight(name: str, tensor: torch.Tensor, expected: Mapping[str, Shape]) -> None:
    """Raise :class:`CheckpointError` unless ``tensor`` has the shape that is expected."""
    shape = tuple(tensor.shape)
    if name not in expected:
        raise CheckpointError(f"{name} {list(shape)} has no place in a model of this shape")
    if shape != expected[name]:
        raise CheckpointError(
            f"{name} is {list(shape)}; a model of this shape has {list(expected[name])}"
        )


def _shapes(c: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, vocabulary = c.hidden_size, c.padded_vocab_size
    bert = c.architecture == "bert"
    yield WORD_EMBEDDING, (vocabulary, hidden)
    if c.position_embedding_type == "learned_absolute":
        yield "embedding.position_embeddings.weight", (c.max_position_embeddings, hidden)
    if c.num_tokentypes:
        yield "embedding.tokentype_embeddings.weight", (c.num_tokentypes, hidden)
    stack = "encoder" if bert else "decoder"
    for number in range(c.num_layers):
        for name, shape in _layer(c):
            yield f"{stack}.layers.{number}.{name}", shape
    yield from _norm(c, f"{stack}.final_layernorm", hidden)
    if c.untie_embeddings_and_output_weights:
        yield OUTPUT_LAYER, (vocabulary, hidden)
    if bert:
        yield "output_layer.bias", (vocabulary,)
        yield from _linear(c, "lm_head.dense", hidden, hidden, bias=True)
        yield from _norm(c, "lm_head.layer_norm", hidden)
    if c.binary_head:
        yield from _linear(c, "pooler.dense", hidden, hidden, bias=True)
        yield from _linear(c, "binary_head", 2, hidden, bias=True)


def _layer(c: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, heads = c.hidden_size, c.num_attention_heads * c.kv_channels
    qkv = heads + 2 * c.num_query_groups * c.kv_channels
    attention, inner = "self_attention", c.ffn_hidden_size * (2 if c.swiglu else 1)
    yield from _norm(c, "input_layernorm", hidden)
    yield from _linear(c, f"{attention}.linear_qkv", qkv, hidden, bias=c.qkv_bias)
    if c.qk_layernorm:
        yield from _norm(c, f"{attention}.q_layernorm", c.kv_channels)
        yield from _norm(c, f"{attention}.k_layernorm", c.kv_channels)
    yield from _linear(c, f"{attention}.linear_proj", hidden, heads)
    yield from _norm(c, "pre_mlp_layernorm", hidden)
    yield from _linear(c, "mlp.linear_fc1", inner, hidden)
    yield from _linear(c, "mlp.linear_fc2", hidden, c.ffn_hidden_size)


def _linear(
    c: ModelConfig, name: str, outputs: int, inputs: int, bias: bool | None = None
) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs)
    if c.add_bias_linear if bias is None else bias:
        yield f"{name}.bias", (outputs,)


def _norm(c: ModelConfig, name: str, size: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (size,)
    if c.normalization == "LayerNorm":
        yield f"{name}.bias", (size,)
