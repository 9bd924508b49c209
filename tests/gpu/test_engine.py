"""Transformer Engine's and Apex's layers on a GPU against the local ones, where they are installed.

What needs no GPU of it is in ``tests/unit/model/test_engine.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flex.model.check_layers import check_layers, engine_version
from megatron_flex.model.config import ModelConfig, local
from megatron_flex.model.modules import ApexNorm, fused_layer_norm
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize, update
from megatron_flex.runtime.slab import Buffers, Slab, SlabLayout
from tests.close import assert_close, assert_numbers_close
from tests.engine.passes import half_trained
from tests.gpu.launch import SECONDS, Launch, flags_of
from tests.gpu.test_model import LLAMA
from tests.unit.model.support import make_bert, make_config

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
engine = pytest.mark.skipif(engine_version() is None, reason="needs Transformer Engine")
apex = pytest.mark.skipif(not fused_layer_norm.HAVE_FUSED_LAYER_NORM, reason="needs Apex")

DEVICE = torch.device("cuda", 0)
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "kv_channels": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 512,
    "max_position_embeddings": 256,
    "init_method_std": 0.05,
    "params_dtype": "bfloat16",
    "transformer_impl": "transformer_engine",
}
MODELS = {
    "gpt": make_config(**WIDE),
    "llama": make_config(**{**WIDE, **LLAMA, "kv_channels": 32}, qk_layernorm=True),
    "bert": make_bert(**WIDE, apply_layernorm_1p=True),
    "first bert": make_bert(**WIDE, apply_residual_connection_post_layernorm=True),
}
LENGTHS = [(7, 20, 33), (100,), (3, 90, 40)]
RECIPES = ("tensorwise", "mxfp8", "blockwise")


def hold(config: ModelConfig) -> Holdings:
    return Holdings(config, Plan.parse(f"0:{config.layers.num_units}@0"), 0, DEVICE)


def train(held: Holdings, *, split: bool = False, again: bool = False) -> dict[str, torch.Tensor]:
    """Losses, and gradients of all slabs, after several micro-batches."""
    losses, tapes = half_trained(held, LENGTHS, DEVICE, split=split, again=again)
    for tape in reversed(tapes):
        tape.run()
    found = {f"gradients of slab {s.index}": s.grads.clone() for s in held}
    for slab in held:
        slab.grads.zero_()
    return {"losses": torch.stack(losses), **found}


def assert_all_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    for name, value in expected.items():
        assert_close(found[name], value, tolerance, name)


@cuda
@engine
@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_losses_and_gradients_are_the_local_ones(model: str) -> None:
    config = MODELS[model]
    theirs, ours = hold(config), hold(local(config))
    assert all(torch.equal(a.params, b.params) for a, b in zip(theirs, ours, strict=True))
    assert_all_close(train(theirs), train(ours), 3e-2)


@cuda
@engine
def test_float32_losses_and_gradients_are_the_local_ones() -> None:
    config = make_config(**{**WIDE, "params_dtype": "float32"})
    assert_all_close(train(hold(config)), train(hold(local(config))), 1e-3)


@cuda
@engine
@pytest.mark.parametrize("recipe", ["", *RECIPES])
def test_split_and_recomputed_passes_give_what_whole_ones_do(recipe: str) -> None:
    fp8 = {"fp8_format": "hybrid", "fp8_recipe": recipe} if recipe else {}
    config = make_config(**WIDE, **fp8)
    try:
        check_layers(config, DEVICE)
    except ValueError as error:  # a recipe for other GPUs
        pytest.skip(str(error))
    held = hold(config)
    whole = train(held)
    assert_all_close(train(held, split=True), whole, 1e-4)
    assert_all_close(train(held, again=True), whole, 1e-4)
    if recipe:
        assert_all_close(whole, train(hold(local(config))), 0.2)


@cuda
@engine
def test_a_slab_that_went_and_came_back_gets_the_same_gradients() -> None:
    held = hold(MODELS["gpt"])
    expected = train(held)
    state = held.slabs[1].state.clone()
    held.drop(1)
    slab = held.join(1)
    slab.state.copy_(state)
    slab.params_from_masters()
    assert_all_close(train(held), expected, 1e-5)


@cuda
@apex
@pytest.mark.parametrize("width", [1024, 1000])
@pytest.mark.parametrize("persist", [True, False])
def test_apexs_norm_is_pytorchs(width: int, persist: bool) -> None:
    from megatron_flex.model.modules import APEX

    config = make_config(hidden_size=width, persist_layer_norm=persist)
    norm = ApexNorm(APEX.core(config), width, 1e-5).to(DEVICE)
    x = torch.randn(300, 1, width, device=DEVICE, requires_grad=True)
    out = norm(x)
    out.square().sum().backward()
    x2 = x.detach().clone().requires_grad_()
    weight, bias = (p.detach().clone().requires_grad_() for p in (norm.weight, norm.bias))
    expected = torch.nn.functional.layer_norm(x2, (width,), weight, bias, 1e-5)
    expected.square().sum().backward()
    assert_close(out, expected, 1e-5)
    for found, other in ((x, x2), (norm.weight, weight), (norm.bias, bias)):
        assert found.grad is not None
        assert other.grad is not None
        assert_close(found.grad, other.grad, 1e-4)


@cuda
@pytest.mark.parametrize("module", ["transformer_engine.pytorch.optimizers", "apex.optimizers"])
def test_updates_are_those_of_the_optimizers_that_megatron_takes(module: str) -> None:
    fused = getattr(pytest.importorskip(module), "FusedAdam", None)
    if fused is None:
        pytest.skip("another package of this name")
    numel, constants = 1 << 16, OptimizerConfig()
    layout = SlabLayout.of([("weight", torch.Size((numel // 64, 64)))], lambda *_: True)
    slab = Slab(0, layout, Buffers.allocate(layout.numel, torch.bfloat16, DEVICE, False))
    slab.master.normal_()
    weight = torch.nn.Parameter(slab.master.clone())
    betas = constants.adam_beta1, constants.adam_beta2
    theirs = fused([weight], lr=1e-3, betas=betas, eps=constants.adam_eps, weight_decay=0.1)
    for step in range(5):
        slab.grads.normal_()
        weight.grad = slab.grads.clone()
        update(slab, constants, StepSize(1e-3, 0.1), 1.0, step)
        theirs.step()
        assert_close(slab.master, weight.detach(), 1e-6)


ITERATIONS = 8
CHANGING = "0:3@0 | 3:8@1\n0:5@1 | 5:8@0\n0:8@0,1\n0:4@0 | 4:8@1 ; recompute 1 ; activations 2\n"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    more = "--bf16 --transformer-impl transformer_engine --micro-batch-tokens 64"
    return flags_of(tmp_path_factory.mktemp("data"), ITERATIONS, more)


@cuda
@engine
@pytest.mark.parametrize("more", ["", "--fp8-format hybrid"])
def test_changing_plans_train_as_one_worker_does(
    flags: list[str], tmp_path: Path, more: str
) -> None:
    common = [*flags, *more.split()]
    if more:
        try:
            check_layers(make_config(**WIDE, fp8_format="hybrid"), DEVICE)
        except ValueError as error:
            pytest.skip(str(error))
    with Launch(tmp_path / "one", common) as job:
        job.wait(SECONDS)
        expected = job.losses()
        assert len(expected) == ITERATIONS
    script = tmp_path / "plans.txt"
    script.write_text(ITERATIONS * CHANGING)
    ways = ["--flexpipe-plans", str(script), "--flexpipe-schedule", "zb-h1"]
    with Launch(tmp_path / "two", [*common, *ways], size=2) as job:
        job.wait(SECONDS)
        assert_numbers_close(job.losses(), expected, 2e-2)


@cuda
@engine
def test_a_checkpoint_goes_on_with_local_layers(flags: list[str], tmp_path: Path) -> None:
    saved = ["--save", str(tmp_path / "saved"), "--save-interval", "4"]
    with Launch(tmp_path / "engine", [*flags, *saved]) as job:
        job.wait(SECONDS)
        expected = job.losses()
    own = [w if w != "transformer_engine" else "local" for w in flags]
    load = ["--load", str(tmp_path / "saved"), "--ckpt-step", "4"]
    with Launch(tmp_path / "local", [*own, *load]) as job:
        job.wait(SECONDS)
        assert_numbers_close(job.losses(), expected[4:], 2e-2)
