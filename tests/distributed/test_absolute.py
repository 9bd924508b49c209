"""Training against a model of its own in float64: a fault that all plans share shows only here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_flex.data.microbatches import CostCoefficients, cut_by_tokens
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.holdings import Holdings
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.oracles.model import Step, Training

ITERATIONS = 4
TOLERANCE = 1e-5
LONGEST = 30
# Weights large enough for the layers to matter.
PLAIN: dict[str, Any] = {
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.1
}  # fmt: skip
MODERN: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "num_query_groups": 2,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
MODELS: dict[str, ModelConfig] = {
    "gpt": replace(jobs.TINY, **PLAIN),
    "gpt, modern": replace(jobs.TINY, **PLAIN, **MODERN),
    # Small weights: some gradients are clipped, some are not.
    "gpt, half rotary, qk norms": replace(
        jobs.TINY,
        **{**PLAIN, **MODERN, "init_method_std": 0.004},
        rotary_percent=0.5,
        qk_layernorm=True,
        apply_layernorm_1p=True,
    ),
    "bert": replace(jobs.BERT, **PLAIN),
    "bert, without the second loss": replace(
        jobs.BERT, **PLAIN, binary_head=False, num_tokentypes=0, apply_layernorm_1p=True
    ),
    "bert, modern": replace(
        jobs.BERT, **PLAIN, **{**MODERN, "normalization": "LayerNorm", "num_query_groups": 1}
    ),
}
# Both plans have a stage with two replicas, and slabs move between them.
ALONE, SPREAD = ["0:{end}@0"], ["0:3@0,1 | 3:{end}@2", "0:5@0 | 5:{end}@1,2"]


def initial(config: ModelConfig) -> dict[str, torch.Tensor]:
    """The weights that a run begins with."""
    plan = Plan.parse(f"0:{config.layers.num_units}@0")
    holdings = Holdings(config, plan, 0, torch.device("cpu"))
    return {n: t for slab in holdings for n, t in slab.named_state(optimizer=False).items()}


def train(config: ModelConfig, clip: float, iterations: int) -> tuple[Training, list[Step]]:
    """What :func:`jobs.train` should give, with an evaluation after every iteration."""
    training, steps = Training(config, initial(config)), []
    for iteration in range(iterations):
        batch = jobs.batch_of(iteration, longest=LONGEST)
        parts = cut_by_tokens(batch, 2 * LONGEST // 3, CostCoefficients())
        packed = [jobs.packed(config, part, frozenset()) for part in parts]
        steps.append(
            training.step(
                packed, learning_rate=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.999,
                eps=jobs.ADAM_EPS, clip_grad=clip,
            )
        )  # fmt: skip
        with torch.no_grad():
            steps.append(Step(tuple(float(x) for x in training.means(packed)), 0.0))
    return training, steps


def assert_close(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Tensor by tensor, relative to each one's norm, beside that of the largest."""
    largest = max(float(t.norm()) for t in expected.values())
    for name, value in expected.items():
        error = float((actual[name].double() - value).norm())
        # A key's bias has no gradient in theory, and noise in practice.
        assert error <= TOLERANCE * float(value.norm()) + 2e-6 * largest, (
            f"{name}: {error:.2e} beside {float(value.norm()):.2e}"
        )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plans", [ALONE, SPREAD], ids=["one process", "three workers"])
def test_losses_gradients_and_updates_equal_a_float64_model(
    workers: WorkerPool, name: str, plans: list[str]
) -> None:
    config = MODELS[name]
    texts = [plan.format(end=config.layers.num_units) for plan in plans]
    for iterations in (1, ITERATIONS):
        results, state = jobs.merge(
            workers.run(
                1 if plans is ALONE else 3, jobs.train, config, texts, iterations,
                longest=LONGEST, evaluate=True,
            )
        )  # fmt: skip
        training, steps = train(config, jobs.CLIP_GRAD, iterations)
        np.testing.assert_allclose(
            [r.losses for r in results], [s.losses for s in steps], rtol=1e-6
        )
        norms = [s.grad_norm for s in steps[::2]]
        np.testing.assert_allclose([r.grad_norm for r in results[::2]], norms, rtol=1e-6)
        clipped = {norm > jobs.CLIP_GRAD for norm in norms}
        assert clipped == ({True, False} if "half" in name and len(norms) > 1 else {True})
        prefix = "optimizer.state."
        # After one iteration these are the gradients themselves: a tenth, and their squares.
        for kind in ("exp_avg", "exp_avg_sq"):
            actual = {n: state[f"{prefix}{kind}.{n}"] for n in training.weights}
            assert_close(actual, getattr(training, kind))
        assert_close(state, training.weights)
