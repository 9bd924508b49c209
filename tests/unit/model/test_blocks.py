"""Blocks: parameters by slab, initial values, recomputation, neighbours, types."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.blocks import (
    Block,
    HeadBlock,
    LayerBlock,
    build_block,
    build_shell,
    decays,
)
from megatron_flex.model.config import ModelConfig, loss_names
from megatron_flex.model.keys import EMBEDDING_SITE, attention_site
from megatron_flex.model.layers import Kind
from tests.close import assert_close
from tests.unit.model.support import (
    build_model,
    hidden_states,
    make_batch,
    make_bert,
    make_config,
    named_parameters,
    run,
    split_batch,
)

WORDS = "embedding.word_embeddings.weight"
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.3}


def values(block: Block) -> dict[int, dict[str, torch.Tensor]]:
    return {s: {n: p.detach() for n, p in q.items()} for s, q in block.slab_parameters().items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_each_parameter_is_in_one_slab_and_the_tied_embedding_in_its_own(
    tied: bool, positions: Any
) -> None:
    config = make_config(
        untie_embeddings_and_output_weights=not tied, position_embedding_type=positions
    )
    owners: dict[str, set[int]] = {}
    for unit in config.layers.units:
        slabs = build_block(unit, config).slab_parameters()
        assert tuple(slabs) == unit.slabs
        for slab, parameters in slabs.items():
            for name in parameters:
                owners.setdefault(name, set()).add(slab)
    assert all(len(slabs) == 1 for slabs in owners.values())
    assert owners[WORDS] == ({config.layers.tied_slab} if tied else {0})
    assert ("output_layer.weight" in owners) is not tied
    assert ("embedding.position_embeddings.weight" in owners) is (positions != "rope")
    assert owners["decoder.layers.1.self_attention.linear_qkv.weight"] == {3}
    assert owners["decoder.layers.1.mlp.linear_fc2.bias"] == {4}
    assert owners["decoder.final_layernorm.weight"] == {5}


def test_initial_values_depend_on_seed_and_slab_alone() -> None:
    config = make_config()
    units = config.layers.units
    forwards = {u.index: values(build_block(u, config)) for u in units}
    torch.manual_seed(99)
    torch.rand(17)
    for unit in reversed(units):
        again = values(build_block(unit, config))
        for slab, parameters in again.items():
            for name, value in parameters.items():
                assert torch.equal(value, forwards[unit.index][slab][name]), name
    tied = config.layers.tied_slab
    assert tied is not None
    assert torch.equal(forwards[0][tied][WORDS], forwards[units[-1].index][tied][WORDS])
    other = values(build_block(units[1], make_config(seed=8)))
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert not torch.equal(other[1][name], forwards[1][1][name])


def test_initial_values_follow_megatrons_init_methods() -> None:
    config = make_config(
        hidden_size=256, ffn_hidden_size=1024, kv_channels=64, num_layers=8, init_method_std=0.02
    )
    found: dict[str, torch.Tensor] = {}
    for index in (0, 3, 4, 17):
        for parameters in values(build_block(config.layers.units[index], config)).values():
            found.update(parameters)
    scaled = 0.02 / (2 * 8) ** 0.5
    for name, value in found.items():
        if name.endswith("bias"):
            assert torch.count_nonzero(value) == 0, name
        elif "layernorm" in name:
            assert torch.all(value == 1), name
        else:
            std = scaled if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0.02
            assert abs(float(value.std()) / std - 1) < 0.03, name
            assert abs(float(value.mean())) < 0.1 * std, name


@pytest.mark.parametrize("make", [make_config, make_bert])
def test_blocks_bound_to_views_of_slabs_compute_and_accumulate_there(make: Any) -> None:
    config = make()
    batch = make_batch((5, 9), config)
    plain = build_model(config)
    expected = run(plain, batch)
    expected.sum().backward()
    bound = [build_block(unit, config) for unit in config.layers.units]
    slabs: dict[int, dict[str, torch.nn.Parameter]] = {}
    for block in bound:
        for slab, parameters in block.slab_parameters().items():
            if slab not in slabs:
                buffer = torch.cat([p.detach().flatten() for p in parameters.values()])
                views, first = {}, 0
                for name, parameter in parameters.items():
                    view = buffer[first : first + parameter.numel()].view(parameter.shape)
                    views[name] = torch.nn.Parameter(view)
                    first += parameter.numel()
                slabs[slab] = views
            for name, view in slabs[slab].items():
                block.bind(name, view)
    losses = run(bound, batch)
    assert torch.equal(losses, expected)
    losses.sum().backward()
    reference = named_parameters(plain)
    for views in slabs.values():
        for name, view in views.items():
            expected_grad = reference[name].grad
            assert view.grad is not None
            assert expected_grad is not None
            assert torch.equal(view.grad, expected_grad), name
    assert named_parameters(bound)[WORDS] is slabs[config.layers.units[0].slabs[-1]][WORDS]


def test_binding_something_else_is_an_error() -> None:
    block = build_block(make_config().layers.units[1], make_config())
    with pytest.raises(KeyError, match="unit 1 has no parameter 'x'"):
        block.bind("x", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match="is \\(32,\\)"):
        block.bind("decoder.layers.0.input_layernorm.weight", torch.nn.Parameter(torch.zeros(3)))


def test_biases_and_vectors_are_not_decayed() -> None:
    shapes = {n: p.shape for n, p in named_parameters(build_model(make_config())).items()}
    decayed = {n for n, shape in shapes.items() if decays(n, shape)}
    assert decayed == {n for n in shapes if n.endswith("weight") and "layernorm" not in n}
    assert not decays("x.bias", (3, 4))


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["no dropout", "dropout"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"position_embedding_type": "rope", "num_query_groups": 2}, {"causal": False}],
    ids=["gpt", "rope", "both directions"],
)
def test_a_samples_loss_does_not_change_by_one_bit_with_its_neighbours_contents(
    dropout: dict[str, float], changes: dict[str, Any]
) -> None:
    config = make_config(**changes, **dropout)
    blocks = build_model(config)
    head = blocks[-1]
    assert isinstance(head, HeadBlock)
    lengths = (7, 20, 33)

    def losses(batch: PackedBatch) -> torch.Tensor:
        normed = head.final_layernorm(hidden_states(blocks, batch).squeeze(1))
        return head.token_losses(normed, batch)[7:27]

    batch = make_batch(lengths, config)
    assert batch.tokens is not None
    assert batch.labels is not None
    assert batch.loss_mask is not None
    before = losses(batch)
    inside = torch.zeros(60, dtype=torch.bool)
    inside[7:27] = True
    others = dataclasses.replace(
        batch,
        tokens=torch.where(inside, batch.tokens, (batch.tokens + 31) % 64),
        labels=torch.where(inside, batch.labels, (batch.labels + 5) % 64),
        loss_mask=torch.where(inside, batch.loss_mask, 1 - batch.loss_mask),
        samples=(100, batch.samples[1], 200),
    )
    assert torch.equal(before, losses(others))
    # Its own sample number does decide what is dropped.
    renumbered = losses(dataclasses.replace(batch, samples=(0, 5, 2)))
    assert torch.equal(before, renumbered) is not bool(dropout)


def test_packed_samples_give_the_losses_and_gradients_of_the_samples_run_apart() -> None:
    config = make_config(**DROPOUT)
    batch = make_batch((3, 5), config)
    packed, apart = build_model(config), build_model(config)
    loss = run(packed, batch)
    loss.backward()
    total = torch.zeros(1)
    for part in split_batch(batch):
        one = run(apart, part)
        one.backward()
        total += one.detach()
    assert_close(loss, total, 1e-6)
    theirs = named_parameters(apart)
    for name, parameter in named_parameters(packed).items():
        grad = theirs[name].grad
        assert parameter.grad is not None
        assert grad is not None
        assert_close(parameter.grad, grad, 4e-6, name)


@pytest.mark.parametrize("make", [make_config, make_bert])
def test_recomputed_blocks_give_the_same_bits(make: Any) -> None:
    config = make(**DROPOUT)
    batch = make_batch((6, 13), config)
    results = []
    for recompute in (False, True):
        blocks = build_model(config)
        hidden = blocks[0](None, batch)
        for block in blocks[1:-1]:
            if recompute:
                hidden = checkpoint(block, hidden, batch, use_reentrant=False)
            else:
                hidden = block(hidden, batch)
        # Another micro-batch goes through the same blocks before the backward pass.
        run(blocks, make_batch((2, 40), config, seed=4))
        losses = blocks[-1](hidden, batch)
        losses.sum().backward()
        results.append((losses.detach(), named_parameters(blocks)))
    assert torch.equal(results[0][0], results[1][0])
    for name, parameter in results[0][1].items():
        assert torch.equal(parameter.grad, results[1][1][name].grad), name  # type: ignore[arg-type]


def test_evaluation_drops_nothing() -> None:
    config = make_config(**DROPOUT)
    batch = make_batch((6, 13), config)
    blocks = build_model(config)
    for block in blocks:
        block.eval()
    assert torch.equal(run(blocks, batch), run(build_model(make_config()), batch))


def test_a_micro_batch_whose_targets_are_all_masked_contributes_nothing() -> None:
    config = make_config()
    batch = make_batch((6, 13), config)
    batch = dataclasses.replace(batch, loss_mask=torch.zeros(19), labels=torch.full((19,), -100))
    blocks = build_model(config)
    loss = run(blocks, batch)
    assert loss.tolist() == [0.0]
    loss.backward()
    assert all(torch.count_nonzero(p.grad) == 0 for b in blocks for p in b.parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"position_embedding_type": "rope", "swiglu": True}])
def test_a_bfloat16_model_is_close_to_the_float32_one(changes: dict[str, Any]) -> None:
    config = make_config(init_method_std=0.05, **changes)
    half = dataclasses.replace(config, params_dtype="bfloat16")
    batch = make_batch((6, 13, 40), config)
    exact, blocks = build_model(config), build_model(half)
    assert {p.dtype for b in blocks for p in b.parameters()} == {torch.bfloat16}
    assert hidden_states(blocks, batch).dtype is torch.bfloat16
    loss = run(blocks, batch)
    assert loss.dtype is torch.float32
    assert_close(loss, run(exact, batch), 4e-4)
    loss.backward()
    run(exact, batch).backward()
    theirs = named_parameters(exact)
    for name, parameter in named_parameters(blocks).items():
        assert parameter.grad is not None
        grad = theirs[name].grad
        assert grad is not None
        assert_close(parameter.grad, grad, 0.1, name)


def test_two_halves_equal_megatron_cores_whole_layer_bit_for_bit() -> None:
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    from megatron_flex.model.context import context_of
    from megatron_flex.model.megatron import (
        ModuleSpec,
        ProcessGroupCollection,
        Ranks,
        transformer_config,
    )

    class PlainAdd(torch.nn.Module):
        def forward(self, training: bool, fused: bool) -> Any:
            return lambda x, residual, p: residual + (x[0] if x[1] is None else x[0] + x[1])

    config = make_config()
    halves = [build_block(config.layers.units[i], config) for i in (1, 2)]
    attention: Any = halves[0].layer.submodules_config  # type: ignore[union-attr]
    mlp: Any = halves[1].layer.submodules_config  # type: ignore[union-attr]
    whole = TransformerLayer(
        transformer_config(config),
        TransformerLayerSubmodules(
            input_layernorm=attention.input_layernorm,
            self_attention=attention.self_attention,
            self_attn_bda=ModuleSpec(PlainAdd),
            pre_mlp_layernorm=mlp.pre_mlp_layernorm,
            mlp=mlp.mlp,
            mlp_bda=ModuleSpec(PlainAdd),
        ),
        pg_collection=ProcessGroupCollection(tp=Ranks(), cp=Ranks(), pp=Ranks()),
    )
    ours = {n.removeprefix("decoder.layers.0."): p for n, p in named_parameters(halves).items()}
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(ours.pop(name))
    assert not ours
    batch = make_batch((5, 20), config)
    hidden = torch.randn(25, 1, 32)
    expected, _ = whole(hidden, attention_mask=context_of(batch, config, hidden.device))
    assert torch.equal(halves[1](halves[0](hidden, batch), batch), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_query_groups": 3}, "--num-query-groups"),
        ({"padded_vocab_size": 10}, "--padded-vocab-size"),
        ({"hidden_dropout": 1.0}, "--hidden-dropout"),
        ({"attention_dropout": -0.1}, "--attention-dropout"),
        ({"architecture": "bert"}, "both directions"),
        ({"binary_head": True}, "belong to BERT"),
    ],
)
def test_contradictory_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**changes)


def test_norms_that_transformer_engine_fuses_keep_megatrons_plain_names() -> None:
    from megatron_flex.model.megatron import plain_name

    assert plain_name("self_attention.linear_qkv.layer_norm_weight") == "input_layernorm.weight"
    assert plain_name("mlp.linear_fc1.layer_norm_bias") == "pre_mlp_layernorm.bias"
    assert plain_name("mlp.linear_fc1.weight") == "mlp.linear_fc1.weight"


def test_the_head_names_its_losses() -> None:
    assert loss_names(make_config()) == ("lm loss",)
    assert loss_names(make_bert()) == ("lm loss", "sop loss")
    assert loss_names(make_bert(binary_head=False)) == ("lm loss",)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_missing_input_is_named(kind: Kind) -> None:
    config: ModelConfig = make_config()
    unit = next(u for u in config.layers.units if u.kind is kind)
    block = build_block(unit, config)
    bare = PackedBatch((3,), (0,), (0,))
    hidden = torch.zeros(3, 1, 32) if kind is Kind.HEAD else None
    with pytest.raises(ValueError, match="needs the"):
        block(hidden, bare)


def test_a_shell_computes_once_its_parameters_are_bound() -> None:
    config = make_config(position_embedding_type="rope", swiglu=True)
    batch = make_batch((5, 9), config)
    blocks = build_model(config)
    shells = [build_shell(unit, config) for unit in config.layers.units]
    assert all(p.device.type == "meta" for shell in shells for p in shell.parameters())
    for block, shell in zip(blocks, shells, strict=True):
        for parameters in block.slab_parameters().values():
            for name, parameter in parameters.items():
                shell.bind(name, parameter)
    assert torch.equal(run(shells, batch), run(blocks, batch))


def test_every_place_with_dropout_drops_in_its_own_way() -> None:
    config = make_config(**{**DROPOUT, "hidden_dropout": 0.5})
    blocks = build_model(config)
    embedded = blocks[0](None, make_batch((40, 20), config))
    assert 0.4 < (embedded == 0).float().mean() < 0.6
    layers = [block for block in blocks if isinstance(block, LayerBlock)]
    sites = [block._bda.site for block in layers]
    for block in layers:
        if block.unit.kind is Kind.ATTENTION:
            options = block.layer.self_attention.core_attention._options[True]
            assert options.layer == block.unit.layer
            sites.append(attention_site(options.layer))
    assert len({EMBEDDING_SITE, *sites}) == 1 + 3 * config.num_layers


def test_a_cut_sample_is_refused_by_attention() -> None:
    config = make_config()
    batch = dataclasses.replace(make_batch((5,), config), starts=(3,), totals=(8,))
    blocks = build_model(config)
    with pytest.raises(ValueError, match="whole"):
        blocks[1](blocks[0](None, batch), batch)


@pytest.mark.parametrize("make", [make_config, make_bert])
def test_rows_that_pad_the_vocabulary_change_no_gradient(make: Any) -> None:
    plain = make(vocab_size=50, padded_vocab_size=50)
    padded = make(vocab_size=50, padded_vocab_size=72)
    batch = make_batch((11, 6), plain)
    found = []
    for config in (plain, padded):
        blocks = build_model(config)
        parameters = named_parameters(blocks)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in parameters.values():
                rows = slice(50 if parameter.shape[0] == config.padded_vocab_size else None)
                part = parameter[rows]
                part.copy_(torch.randn(part.shape, generator=generator) * 0.3)
        run(blocks, batch).sum().backward()
        found.append({n: p.grad for n, p in parameters.items()})
    for name, expected in found[0].items():
        grad = found[1][name]
        assert expected is not None
        assert grad is not None
        assert not grad[len(expected) :].any(), name
        assert_close(grad[: len(expected)], expected, 1e-5, name, least=0.1)
