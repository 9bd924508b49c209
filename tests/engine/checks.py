"""What a process with the double in Transformer Engine's place finds; run by a test.

python -m tests.engine.checks
"""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from typing import Any

import torch

from tests.engine import double

double.install()

from megatron_flex.model.blocks import build_block
from megatron_flex.model.config import ModelConfig, local
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.holdings import Holdings
from tests.close import assert_close
from tests.engine.passes import half_trained
from tests.unit.model.support import build_model, make_batch, make_bert, make_config, run

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "qk_layernorm": True,
}
ENGINE: dict[str, Any] = {"transformer_impl": "transformer_engine"}
FP8: dict[str, Any] = {**ENGINE, "fp8_format": "hybrid"}
CONFIGS = {
    "gpt": make_config(**ENGINE),
    "llama": make_config(**ENGINE, **LLAMA),
    "untied": make_config(**ENGINE, untie_embeddings_and_output_weights=True, add_qkv_bias=True,
                          add_bias_linear=False),
    "bert": make_bert(**ENGINE, apply_layernorm_1p=True),
    "nemotron": make_config(**ENGINE, **LLAMA, apply_layernorm_1p=True),
    "first bert": make_bert(**ENGINE, apply_residual_connection_post_layernorm=True),
}  # fmt: skip


def holdings(config: ModelConfig) -> Holdings:
    return Holdings(config, Plan.parse(f"0:{config.layers.num_units}@0"), 0, CPU)


def train(held: Holdings, lengths: list[tuple[int, ...]], *, split: bool, again: bool = False) -> (
    dict[str, torch.Tensor]
):  # fmt: skip
    """Losses, and gradients after several micro-batches; weight halves in reverse order."""
    losses, tapes = half_trained(held, lengths, CPU, split=split, again=again)
    before = {s.index: s.grads.clone() for s in held}
    for tape in reversed(tapes):
        tape.run()
    found = {f"grads {s.index}": s.grads.clone() for s in held}
    for slab in held:
        if split:  # what a slab owes is its matrices; one-dimensional gradients were there before
            decayed = slab.layout.decayed
            assert torch.equal(before[slab.index][decayed:], slab.grads[decayed:]), slab.index
            if any("linear" in entry.name for entry in slab.layout.entries):
                assert not torch.equal(before[slab.index], slab.grads), slab.index
        slab.grads.zero_()
    return {"losses": torch.stack(losses), **found}


LENGTHS = [(5, 9), (17,), (3, 3, 8)]


def check_models() -> None:
    """Names, slabs and initial values are the local ones; so are losses and gradients."""
    for name, config in CONFIGS.items():
        engine, ours = holdings(config), holdings(local(config))
        for theirs, own in zip(engine, ours, strict=True):
            assert theirs.layout == own.layout, name
            assert torch.equal(theirs.params, own.params), name
        expected = train(ours, LENGTHS, split=False)
        for way in ({"split": False}, {"split": True}, {"split": False, "again": True}):
            found = train(engine, LENGTHS, **way)
            for key, value in expected.items():
                assert_close(found[key], value, 1e-5, f"{name} {way} {key}")
    assert not double.RECIPES


def check_memory() -> None:
    """A slab that is dropped leaves nothing behind, and the next one gets its gradients."""
    config = CONFIGS["gpt"]
    held = holdings(config)
    expected = train(held, LENGTHS, split=True)
    shells = [p for u in (1, 2) for p in held._shells[u][1].values()]
    assert all(p.is_meta for p in shells)
    state = held.slabs[1].state.clone()
    gone = weakref.ref(held.slabs[1].grads)
    held.drop(1)
    held.pool.trim(0)
    gc.collect()
    assert gone() is None
    slab = held.join(1)
    slab.state.copy_(state)
    found = train(held, LENGTHS, split=True)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def check_bfloat16() -> None:
    """Gradients of bfloat16 weights are added in float32, in the slab."""
    config = replace(CONFIGS["gpt"], params_dtype="bfloat16", init_method_std=0.05)
    engine, ours = holdings(config), holdings(local(config))
    expected = train(ours, LENGTHS, split=False)
    for split in (False, True):
        found = train(engine, LENGTHS, split=split)
        for key, value in expected.items():
            assert_close(found[key], value, 2e-2, f"{split} {key}")


def check_fp8() -> None:
    """The recipe of the flags is around every product, and packs must be aligned."""
    names = {"tensorwise": "Float8CurrentScaling", "mxfp8": "MXFP8BlockScaling",
             "blockwise": "Float8BlockScaling"}  # fmt: skip
    wide = {"num_attention_heads": 4, "hidden_size": 128, "kv_channels": 32, "ffn_hidden_size": 128,
            "max_position_embeddings": 256}  # fmt: skip
    for recipe, name in names.items():
        config = make_config(**FP8, fp8_recipe=recipe, **wide, params_dtype="bfloat16",
                             init_method_std=0.05)  # fmt: skip
        held = holdings(config)
        double.RECIPES.clear()
        whole = train(held, LENGTHS, split=False)
        assert set(double.RECIPES) == {name}
        assert len(double.RECIPES) == 4 * config.num_layers * len(LENGTHS)
        split = train(held, LENGTHS, split=True)
        again = train(held, LENGTHS, split=False, again=True)
        plain = train(holdings(local(config)), LENGTHS, split=False)
        for key, value in whole.items():
            assert_close(split[key], value, 2e-7, key)  # the same bits with AVX-512
            assert torch.equal(again[key], value), key
            assert_close(value, plain[key], 0.2, key)
    unaligned = make_batch((5,), config)
    blocks = [held.blocks[u.index] for u in config.layers.units]
    try:
        run(blocks, unaligned)
    except ValueError as error:
        assert "--flexpipe-align-tokens 128" in str(error)
    else:
        raise AssertionError("a micro-batch of 5 tokens was taken")
    held.train(False)
    double.RECIPES.clear()
    with torch.no_grad():
        run(blocks, unaligned)  # a completion, one token after the other
    assert not double.RECIPES


def check_blocks() -> None:
    """A block with memory of its own has the values of the local one, and trains."""
    config = CONFIGS["llama"]
    for unit in config.layers.units:
        theirs, own = (build_block(unit, c).slab_parameters() for c in (config, local(config)))
        for slab, parameters in own.items():
            for name, parameter in parameters.items():
                assert torch.equal(theirs[slab][name], parameter), name
    blocks, others = build_model(config), build_model(local(config))
    batch = make_batch((5, 9), config)
    for some in (blocks, others):
        run(some, batch).sum().backward()
    mine = {n: p.grad for b in blocks for s in b.slab_parameters().values() for n, p in s.items()}
    for block in others:
        for named in block.slab_parameters().values():
            for name, parameter in named.items():
                grad = mine[name]
                assert grad is not None
                assert parameter.grad is not None
                assert_close(grad, parameter.grad, 1e-5, name)


if __name__ == "__main__":
    done = []
    for check in (check_models, check_memory, check_bfloat16, check_fp8, check_blocks):
        check()
        done.append(check.__name__)
    print(json.dumps(done))
