"""The memory model against the modules themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.blocks import build_block
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.planner.memory import (
    boundary_bytes,
    chain_bytes,
    parameter_count,
    slab_elements,
    state_bytes,
    tied_state,
    total_parameters,
    unit_memory,
    word_embedding_count,
)
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.holdings import Holdings

GPT = ModelConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=300, padded_vocab_size=384,
    max_position_embeddings=128, ffn_hidden_size=256, kv_channels=16, num_query_groups=4,
)  # fmt: skip
BERT = replace(GPT, architecture="bert", causal=False, num_tokentypes=2, binary_head=True)
CONFIGS = {
    "gpt": GPT,
    "untied": replace(GPT, untie_embeddings_and_output_weights=True),
    "grouped, gated, rope": replace(
        GPT, num_query_groups=2, swiglu=True, add_bias_linear=False, normalization="RMSNorm",
        position_embedding_type="rope", ffn_hidden_size=160,
    ),
    "normed heads": replace(GPT, qk_layernorm=True),
    "bert": BERT,
    "bert without pairs": replace(BERT, num_tokentypes=0, binary_head=False),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_modules(name: str) -> None:
    config = CONFIGS[name]
    slabs: dict[int, int] = {}
    for unit in config.layers.units:
        for slab, parameters in build_block(unit, config).slab_parameters().items():
            slabs[slab] = sum(p.numel() for p in parameters.values())
    tied = config.layers.tied_slab
    words = word_embedding_count(config)
    for unit in config.layers.units:
        expected = parameter_count(config, unit.kind)
        if tied is None and unit.kind in (Kind.EMBEDDING, Kind.HEAD):
            expected += words
        assert slabs[unit.index] == expected, unit.kind
    if tied is not None:
        assert slabs[tied] == words
    assert sum(slabs.values()) == total_parameters(config)


@pytest.mark.parametrize("name", ["gpt", "grouped, gated, rope"])
@pytest.mark.parametrize("kind", [Kind.ATTENTION, Kind.MLP, Kind.HEAD])
def test_activations_are_what_autograd_keeps(name: str, kind: Kind) -> None:
    config = CONFIGS[name]
    unit = next(u for u in config.layers.units if u.kind is kind)
    block = build_block(unit, config)
    tokens = 96
    batch = PackedBatch(
        lengths=(60, 36), samples=(0, 1), starts=(0, 0),
        labels=torch.zeros(tokens, dtype=torch.long), loss_mask=torch.ones(tokens),
    )  # fmt: skip
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = torch.randn(tokens, 1, config.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = block(hidden, batch)
    assert output.requires_grad
    expected = unit_memory(config)[kind].activation * tokens
    assert sum(kept.values()) == pytest.approx(expected, rel=0.05)


def test_bytes_a_parameter() -> None:
    assert state_bytes(GPT, 1000).total == 16_000
    half = replace(GPT, params_dtype="bfloat16")
    assert state_bytes(half, 1000).total == 18_000
    assert boundary_bytes(half) == 2 * 64
    assert tied_state(CONFIGS["untied"]).total == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_slabs_are_as_large_as_the_runtime_makes_them(name: str) -> None:
    # 47 rows of 40: no multiple of anything that slabs are padded to.
    config = replace(
        CONFIGS[name], vocab_size=45, padded_vocab_size=47, hidden_size=40, kv_channels=10
    )
    whole = Plan.parse(f"0:{config.layers.num_units}@0")
    holdings = Holdings(config, whole, 0, torch.device("cpu"))
    assert slab_elements(config) == tuple(
        holdings.slabs[number].layout.numel for number in range(config.layers.num_slabs)
    )


def test_a_cut_sample_takes_keys_values_and_their_gradients_in_float32() -> None:
    both = chain_bytes(replace(GPT, num_query_groups=2, params_dtype="bfloat16"))
    assert both.keys_values == 2 * 2 * 16 * 2
    assert both.gradients == 2 * 2 * 16 * 4
    # Rows of gradients are whole vectors.
    assert chain_bytes(replace(GPT, kv_channels=20)).gradients == 2 * 4 * 32 * 4
