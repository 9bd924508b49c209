"""Parameters are cut as Megatron cuts them, and the pieces of all ranks are the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.model.blocks import build_shell
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.tensor_cut import (
    Cut,
    check,
    cut_of,
    full_shape,
    is_partial,
    local_shape,
    part_of,
    pieces,
    vocabulary_rows,
)
from megatron_flex.planner.memory import slab_elements, total_parameters
from tests.unit.model.support import make_bert, make_config

CONFIGS: dict[str, ModelConfig] = {
    "gpt": make_config(qk_layernorm=True),
    "swiglu": make_config(swiglu=True, untie_embeddings_and_output_weights=True),
    "bert": make_bert(),
}


def own(tensor: torch.Tensor, cut: Cut | None, index: int, size: int) -> torch.Tensor:
    """A rank's tensor, filled piece by piece."""
    found = torch.full(local_shape(tensor.shape, cut, size), -1.0)
    for piece in pieces(tensor.shape, cut, index, size):
        source, target = tensor, found
        for dim, extent in enumerate(piece.sizes):
            source = source.narrow(dim, piece.offsets[dim], extent)
            target = target.narrow(dim, piece.local[dim], extent)
        target.copy_(source)
    return found


@given(
    size=st.sampled_from([1, 2, 3, 4]),
    dim=st.integers(0, 1),
    parts=st.integers(1, 2),
    rows=st.integers(1, 4),
    other=st.integers(1, 5),
)
def test_the_pieces_of_all_ranks_are_the_whole(
    size: int, dim: int, parts: int, rows: int, other: int
) -> None:
    shape = [other, other]
    shape[dim] = rows * parts * size
    cut = Cut(dim, parts)
    full = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    owned = [own(full, cut, index, size) for index in range(size)]
    assert torch.cat(owned).flatten().sort().values.equal(full.flatten())
    for tensor in owned:
        assert full_shape(tensor.shape, cut, size) == tuple(shape)


def megatrons(name: str, tensor: torch.Tensor, size: int, *, swiglu: bool) -> list[torch.Tensor]:
    """The parts of ``size`` ranks as Megatron-LM's converter makes them."""
    columns = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias",
               "word_embeddings.weight", "output_layer.weight", "output_layer.bias")  # fmt: skip
    if swiglu and "linear_fc1." in name:
        halves = [half.chunk(size) for half in tensor.chunk(2)]
        return [torch.cat(parts) for parts in zip(*halves, strict=True)]
    if name.endswith(columns):
        return list(tensor.chunk(size, 0))
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return list(tensor.chunk(size, 1))
    return [tensor] * size


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("size", [2, 4])
def test_it_is_megatrons_cut(model: str, size: int) -> None:
    config = CONFIGS[model]
    for unit in config.layers.units:
        for parameters in build_shell(unit, config).slab_parameters().values():
            for name, parameter in parameters.items():
                full = torch.rand(parameter.shape)
                cut = cut_of(config, name)
                for index, part in enumerate(megatrons(name, full, size, swiglu=config.swiglu)):
                    assert own(full, cut, index, size).equal(part), name


def test_a_rank_is_a_smaller_model() -> None:
    for config in CONFIGS.values():
        part = part_of(config, 2)
        assert part_of(config, 1) is config
        assert total_parameters(part) < total_parameters(config) <= 2 * total_parameters(part)
        assert all(a <= b for a, b in zip(slab_elements(part), slab_elements(config), strict=True))


def test_which_gradients_are_sums_over_the_group() -> None:
    config = CONFIGS["gpt"]
    layer = "decoder.layers.0."
    names = {
        f"{layer}self_attention.q_layernorm.weight": (True, True),
        f"{layer}input_layernorm.weight": (False, True),
        f"{layer}mlp.linear_fc2.bias": (False, True),
        f"{layer}mlp.linear_fc1.bias": (False, False),
        "embedding.position_embeddings.weight": (False, False),
        "decoder.final_layernorm.weight": (False, True),
    }
    for name, expected in names.items():
        found = tuple(is_partial(config, name, sequence_parallel=s) for s in (False, True))
        assert found == expected, name


def test_rows_of_padding_belong_to_the_last_ranks() -> None:
    config = make_config(vocab_size=41, padded_vocab_size=96)
    assert [vocabulary_rows(config, i, 4) for i in range(4)] == [
        (0, 24),
        (24, 17),
        (48, 0),
        (72, 0),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 3, "num_query_groups": 3}, "--num-attention-heads 3"),
        ({"num_query_groups": 1}, "--num-query-groups 1"),
        ({"ffn_hidden_size": 65}, "--ffn-hidden-size 65"),
        ({"vocab_size": 63, "padded_vocab_size": 63}, "--padded-vocab-size"),
    ],
)
def test_what_cannot_be_cut_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(make_config(**changes), 2)
    check(make_config(**changes), 1)


def test_a_shape_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be divided by 4"):
        local_shape((6, 2), Cut(0), 4)
