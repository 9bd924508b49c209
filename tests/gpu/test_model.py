"""The model on CUDA against the model on the CPU. Skipped where there is no GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_flex.data.microbatch import Slice
from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.blocks import Block, HeadBlock, build_block
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.dropout import masked_scale, masked_scale_torch
from megatron_flex.model.keys import token_keys
from tests.close import assert_close
from tests.unit.model.slices import packed, train, two_chains
from tests.unit.model.support import hidden_states, make_batch, make_config, named_parameters, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "kv_channels": 16,
}


def build(config: ModelConfig, device: str) -> list[Block]:
    blocks = [build_block(unit, config).to(device) for unit in config.layers.units]
    tied = config.layers.tied_slab
    if tied is not None:
        for name, parameter in blocks[0].slab_parameters()[tied].items():
            blocks[-1].bind(name, parameter)
    return blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [512, 37])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_dropout_has_the_cpus_bits(
    dtype: torch.dtype, columns: int, bias: bool, residual: bool
) -> None:
    x, r = torch.randn(2, 300, columns).to(dtype)
    b = torch.randn(columns).to(dtype)
    keys = token_keys(1, [0, 9], [0, 4], [100, 200])
    expected = masked_scale(x, b if bias else None, r if residual else None, keys, 5, 0.3)
    for form in (masked_scale, masked_scale_torch):
        out = form(
            x.cuda(),
            b.cuda() if bias else None,
            r.cuda() if residual else None,
            keys.cuda(),
            5,
            0.3,
        )
        assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["gpt", "llama"])
def test_float32_losses_and_gradients_equal_the_cpus(changes: dict[str, Any]) -> None:
    config = make_config(hidden_dropout=0.2, **changes)
    batch = make_batch((5, 40, 17), config)
    cpu, cuda = build(config, "cpu"), build(config, "cuda")
    loss, other = run(cpu, batch), run(cuda, batch.to(torch.device("cuda")))
    assert_close(other.cpu(), loss, 1e-5)
    loss.backward()
    other.backward()
    theirs = named_parameters(cuda)
    for name, parameter in named_parameters(cpu).items():
        grad = theirs[name].grad
        assert grad is not None
        assert parameter.grad is not None
        assert_close(grad.cpu(), parameter.grad, 1e-4, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [7, 64])
@pytest.mark.parametrize(
    "changes", [{}, LLAMA, {"qk_layernorm": True}], ids=["gpt", "llama", "normed heads"]
)
def test_slices_give_what_whole_samples_give_on_the_cpu(
    changes: dict[str, Any], tokens: int, dtype: str
) -> None:
    config = make_config(
        params_dtype=dtype, hidden_dropout=0.1, max_position_embeddings=256, **changes
    )
    lengths, device = (150, 141, 9, 5, 30), torch.device("cuda")
    uncut = [packed([Slice.all_of(s, n)], config) for s, n in enumerate(lengths)]
    expected = train(build(config, "cpu"), uncut)
    parts = [packed(p, config).to(device) for p in two_chains(lengths, tokens)]
    narrow = dtype == "bfloat16"
    for again in (False, True):
        found = train(build(config, "cuda"), parts, again=again)
        assert_close(found.losses.cpu(), expected.losses, 1e-2 if narrow else 1e-5)
        most = max(g.norm().item() for g in expected.parameters.values())
        for name, gradient in expected.parameters.items():
            near = 5e-2 if narrow else 1e-4
            assert_close(found.parameters[name].cpu(), gradient, near, name, least=1e-2 * most)


@pytest.mark.parametrize("changes", [{}, LLAMA, {"causal": False}], ids=["gpt", "llama", "both"])
def test_bfloat16_is_close_and_neighbours_contents_do_not_matter(changes: dict[str, Any]) -> None:
    config = make_config(
        params_dtype="bfloat16", init_method_std=0.05, hidden_dropout=0.1, **changes
    )
    device = torch.device("cuda")
    batch = make_batch((7, 20, 33), config).to(device)
    blocks = build(config, "cuda")
    head = blocks[-1]
    assert isinstance(head, HeadBlock)

    def losses(of: PackedBatch) -> torch.Tensor:
        return head.token_losses(head.final_layernorm(hidden_states(blocks, of).squeeze(1)), of)

    assert batch.tokens is not None
    inside = torch.zeros(60, dtype=torch.bool, device=device)
    inside[7:27] = True
    others = torch.where(inside, batch.tokens, (batch.tokens + 31) % 64)
    before = losses(batch)
    after = losses(dataclasses.replace(batch, tokens=others))
    assert torch.equal(before[7:27], after[7:27])
    exact = build(dataclasses.replace(config, params_dtype="float32"), "cuda")
    assert_close(run(blocks, batch), run(exact, batch), 2e-2)
