"""Layers that workers share: as one process computes them, and as megatron-core's own do."""

from __future__ import annotations

import dataclasses
import typing
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flex.config.flexpipe import Schedule
from megatron_flex.data.cut import Cut
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.initialize import take
from megatron_flex.model.tensor_cut import cut_of, full_shape, is_partial
from megatron_flex.model.tensor_group import TensorGroup
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.world import World
from tests.close import assert_close
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import UNTIED as WITHOUT_QK_NORMS
from tests.distributed.test_exactness import reference
from tests.unit.model.support import (
    build_model,
    make_batch,
    make_bert,
    make_config,
    named_parameters,
    run,
)

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
MODELS: dict[str, ModelConfig] = {
    "gpt": make_config(vocab_size=41, padded_vocab_size=64, **DROPOUT),
    "llama": make_config(
        untie_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        num_query_groups=2,
        add_bias_linear=False,
        qk_layernorm=True,
        **DROPOUT,
    ),
    "post-norm": make_config(apply_residual_connection_post_layernorm=True),
    "bert": make_bert(**DROPOUT),
}


def _randomize(
    parameters: dict[str, torch.nn.Parameter], whole: ModelConfig, g: TensorGroup
) -> None:
    """Biases and norms too, so that each takes part; the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in parameters.items():
            cut = cut_of(whole, name)
            noise = torch.randn(full_shape(parameter.shape, cut, g.size), generator=generator)
            own = torch.empty_like(parameter)
            take(own, noise, cut, g)
            parameter.add_(own, alpha=0.1)


def _group(*, sequence_parallel: bool) -> TensorGroup:
    """All ranks of the job."""
    limit = timedelta(seconds=30)
    size, cpu = dist.get_world_size(), torch.device("cpu")
    return World.create(cpu, limit, size, sequence_parallel=sequence_parallel).tensor


def _as_alone(models: dict[str, ModelConfig]) -> None:
    """Loss and gradients of a model shared by all ranks, and of one on this rank alone."""
    shared_rows = _group(sequence_parallel=True)
    whole_rows = dataclasses.replace(shared_rows, sequence_parallel=False)
    for name, config in models.items():
        alone = build_model(config)
        expected = named_parameters(alone)
        _randomize(expected, config, TensorGroup())
        batch = make_batch((17, 1, 23, 8), config)  # 49 tokens, no multiple of any size
        losses = run(alone, batch)
        losses.sum().backward()
        for group in (whole_rows, shared_rows):
            what = f"{name}, {'shared' if group.sequence_parallel else 'whole'} rows"
            actual = _begins_alike(config, group, expected, what)
            ours = run(actual, batch)
            assert_close(ours, losses, 1e-6, what)
            ours.sum().backward()
            _same_gradients(config, group, named_parameters(actual), expected, what)


def _begins_alike(
    config: ModelConfig, group: TensorGroup, expected: dict[str, torch.nn.Parameter], what: str
) -> list[Any]:
    """This rank's part of the model, with its part of the same values."""
    shared = build_model(config, group)
    actual = named_parameters(shared)
    _randomize(actual, config, group)
    for name, parameter in actual.items():
        own = torch.empty_like(parameter)
        take(own, expected[name].detach(), cut_of(config, name), group)
        assert own.equal(parameter), f"{what}: {name} does not begin alike"
    return shared


def _same_gradients(
    config: ModelConfig,
    group: TensorGroup,
    actual: dict[str, torch.nn.Parameter],
    expected: dict[str, torch.nn.Parameter],
    what: str,
) -> None:
    for name, parameter in actual.items():
        grad, full = parameter.grad, expected[name].grad
        assert grad is not None, name
        assert full is not None, name
        if is_partial(config, name, sequence_parallel=group.sequence_parallel):
            group.sum(grad)
        own = torch.empty_like(grad)
        take(own, full, cut_of(config, name), group)
        if name.endswith("k_layernorm.bias"):
            assert grad.norm() < 1e-5
        else:
            assert_close(grad, own, 2e-5, f"{what}: {name}", least=1e-3 * full.norm().item())


def test_a_shared_model_equals_one_alone(workers: WorkerPool) -> None:
    workers.run(2, _as_alone, MODELS)
    # Of the vocabulary the last of four has padding only.
    workers.run(4, _as_alone, {"gpt": MODELS["gpt"]})


def _as_megatron(models: dict[str, ModelConfig]) -> None:
    """The same weights in megatron-core's own GPTModel, shared by the same ranks."""
    from megatron.core import parallel_state

    from tests.unit.model.reference import copy_weights, gpt_loss, gpt_model, rotary_on_cpu

    group = _group(sequence_parallel=False)
    parallel_state.initialize_model_parallel(group.size)
    for config in models.values():
        blocks = build_model(config, group)
        ours = named_parameters(blocks)
        _randomize(ours, config, group)
        batch = make_batch((17, 6), config)
        with rotary_on_cpu():
            model = gpt_model(config, tensor_model_parallel_size=group.size)
            theirs = copy_weights(ours, model)
            total = gpt_loss(model, batch)
            total.backward()
        loss = run(blocks, batch)
        loss.backward()
        assert_close(loss[0], total, 2e-6)
        for name, parameter in ours.items():
            grad = theirs[name].grad
            assert parameter.grad is not None, name
            assert grad is not None, name
            if name.endswith("k_layernorm.bias"):
                continue
            assert_close(parameter.grad, grad, 1e-5, name, least=1e-4)


PLAIN: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def test_it_is_what_megatron_cores_own_layers_compute(workers: WorkerPool) -> None:
    models = {m: dataclasses.replace(MODELS[m], vocab_size=64, **PLAIN) for m in ("gpt", "llama")}
    workers.run(2, _as_megatron, models)


# ---- training ------------------------------------------------------------------------------------


def train(
    workers: WorkerPool, config: ModelConfig, plan: Any, size: int, **more: Any
) -> jobs.Merged:
    return jobs.merge(workers.run(size, jobs.train, config, plan, **more))


UNTIED = dataclasses.replace(WITHOUT_QK_NORMS, qk_layernorm=True)
GPT, BERT = jobs.TINY, dataclasses.replace(jobs.BERT, num_layers=3)
CASES: dict[str, tuple[ModelConfig, str, int, int, dict[str, Any]]] = {
    "TP 2": (GPT, "0:8@0", 2, 2, {}),
    "TP 4": (GPT, "0:8@0", 4, 4, {"sequence_parallel": True}),
    "TP 2 x PP 2": (GPT, "0:4@0 | 4:8@1", 4, 2, {}),
    "TP 2 x PP 2, shared rows": (GPT, "0:4@0 | 4:8@1", 4, 2, {"sequence_parallel": True}),
    "TP 2 x (1,2)": (GPT, "0:3@0 | 3:8@1,2", 6, 2, {}),
    "TP 2 x (1,2), shared rows": (UNTIED, "0:3@0 | 3:8@1,2", 6, 2, {"sequence_parallel": True}),
    "untied": (UNTIED, "0:4@1 | 4:8@0", 4, 2, {}),
    "BERT": (BERT, "0:4@0 | 4:8@1", 4, 2, {}),
    "BERT, shared rows": (BERT, "0:8@0,1", 4, 2, {"sequence_parallel": True}),
}


PLANS = [
    "0:4@0 | 4:8@1,2 ; recompute 1-3 ; shard 4-7 ; schedule zb-h1",
    "0:8@0,1,2 ; activations 2,5 ; shard 0-7",
    "0:3@2 | 3:8@0,1 ; optimizer 3-6 ; schedule zb",
    "0:2@0 | 2:4@1 | 4:6@0 | 6:8@1 ; schedule interleaved",
    "0:2@0 | 2:4@1 | 4:6@2 | 6:8@0 ; schedule gpipe",
    "0:3@1 | 3:6@2 | 6:8@0 ; schedule zb-h2",
    "0:2@1 | 2:4@0 | 4:6@0 | 6:8@1 ; recompute 3 ; schedule zb-v",
    "0:2@2 | 2:4@1 | 4:6@1 | 6:8@2 ; schedule v-half",
    "0:3@0 | 3:6@1 | 6:8@2 ; schedule seq1f1b",
    "0:2@0 | 2:4@2 | 4:6@2 | 6:8@0 ; schedule v-min",
]
"""On three devices, one after the other: every policy."""
CHAINS = Cut(40, by_cost=True, sliced=True, cost=CostCoefficients(1.0, 0.02))
RUNS: dict[str, dict[str, Any]] = {
    "in slices": {"cut": CHAINS},
    "whole samples": {},
}
"""How a batch is cut."""


def _is_one_process(
    workers: WorkerPool, config: ModelConfig, plan: Any, size: int, cut: str, **shared: Any
) -> None:
    # A plan that stays needs no more iterations than its moments and the clipping do.
    options = {"iterations": 5 if isinstance(plan, str) else len(PLANS), **RUNS[cut]}
    expected = reference(workers, config, **options)
    jobs.assert_same(train(workers, config, plan, size, **shared, **options), expected)


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(workers: WorkerPool, case: str) -> None:
    config, plan, size, sharing, more = CASES[case]
    cut = "in slices" if config is GPT else "whole samples"
    _is_one_process(workers, config, plan, size, cut, sharing=sharing, **more)


@pytest.mark.parametrize(
    ("model", "cut", "sequence_parallel"),
    [("tied", "in slices", False), ("tied", "in slices", True), ("untied", "whole samples", True)],
)
def test_changing_plans_equal_one_process(
    workers: WorkerPool, model: str, cut: str, sequence_parallel: bool
) -> None:
    config = {"tied": GPT, "untied": UNTIED}[model]
    shared: dict[str, Any] = {"sharing": 2, "sequence_parallel": sequence_parallel}
    if not sequence_parallel:  # messages to other servers go in shares: each device is one
        shared["divided"] = 1
    _is_one_process(workers, config, PLANS, 6, cut, way="mixed", **shared)


def test_every_policy_is_tried() -> None:
    """In the plans above; ``auto`` chooses among them."""
    tried = {Plan.parse(text).schedule or "1f1b" for text in PLANS}
    assert tried == set(typing.get_args(Schedule)) - {"auto"}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["bf16", "shared rows"])
def test_exact_sums_have_the_same_bits_under_any_plans(
    workers: WorkerPool, sequence_parallel: bool
) -> None:
    options: dict[str, Any] = {"iterations": 8, "exact": True, "cut": CHAINS, "sharing": 2}
    options["sequence_parallel"] = sequence_parallel
    narrow: Any = "float32" if sequence_parallel else "bfloat16"
    config = dataclasses.replace(UNTIED, params_dtype=narrow)
    expected = train(workers, config, "0:8@0", 2, **options)
    got = train(workers, config, PLANS, 6, way="mixed", migrate=True, **options)
    jobs.assert_equal_bits(got, expected)
