"""Training under any static plan equals one process, and this suite would notice if it did not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.static import static_plan
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool

TIED = jobs.TINY
UNTIED = replace(
    jobs.TINY,
    untie_embeddings_and_output_weights=True,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    num_query_groups=2,
    add_bias_linear=False,
)
SEVEN = replace(jobs.TINY, num_layers=7, hidden_size=16, ffn_hidden_size=32, kv_channels=4)
ELEVEN = replace(SEVEN, num_layers=11)
MODELS = {"tied": TIED, "untied": UNTIED, "7 layers": SEVEN, "11 layers": ELEVEN}

_references: dict[tuple[ModelConfig, str], jobs.Merged] = {}


def reference(workers: WorkerPool, config: ModelConfig, **options: Any) -> jobs.Merged:
    """One process's run, made once for each model and set of options."""
    key = (config, repr(sorted(options.items(), key=str)))
    if key not in _references:
        whole = f"0:{config.layers.num_units}@0"
        _references[key] = jobs.merge(workers.run(1, jobs.train, config, whole, **options))
    return _references[key]


def same_as_one_process(
    workers: WorkerPool, config: ModelConfig, plan: str, size: int, **options: Any
) -> None:
    expected = reference(workers, config, **options)
    jobs.assert_same(jobs.merge(workers.run(size, jobs.train, config, plan, **options)), expected)


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize(("stages", "size"), [(2, 2), (4, 4), (1, 2), (1, 4), (2, 4)])
def test_even_plans_equal_one_process(
    workers: WorkerPool, model: str, stages: int, size: int
) -> None:
    plan = static_plan(MODELS[model], stages, size)
    same_as_one_process(workers, MODELS[model], str(plan), size)


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize(
    ("plan", "size"),
    [
        ("0:3@0 | 3:8@1,2", 3),  # (1,2)
        ("0:2@0,1 | 2:5@2 | 5:8@3", 4),  # (2,1,1)
        ("0:3@3 | 3:8@0,1,2", 4),  # (1,3), devices out of order
        ("0:1@2 | 1:7@0 | 7:8@2,3", 4),  # a device with two stages, another idle
    ],
)
def test_uneven_data_parallelism_equals_one_process(
    workers: WorkerPool, model: str, plan: str, size: int
) -> None:
    same_as_one_process(workers, MODELS[model], plan, size)


@pytest.mark.parametrize(("model", "stages"), [("7 layers", 2), ("11 layers", 4)])
def test_uneven_layers_equal_one_process(workers: WorkerPool, model: str, stages: int) -> None:
    plan = static_plan(MODELS[model], stages, stages)
    same_as_one_process(workers, MODELS[model], str(plan), stages)


def test_gpipe_equals_one_process(workers: WorkerPool) -> None:
    expected = reference(workers, TIED)
    got = workers.run(3, jobs.train, TIED, "0:2@0 | 2:6@1 | 6:8@2", policy="gpipe")
    jobs.assert_same(jobs.merge(got), expected)


@pytest.mark.parametrize(
    "fault",
    [
        "lost moments of one bias",
        "lost step count",
        "wrong decay group",
        "norm counted twice",
        "missed micro-batch",
        "missing reduction",
    ],
)
def test_the_comparison_notices(workers: WorkerPool, fault: str) -> None:
    expected = reference(workers, TIED)
    broken = workers.run(3, jobs.train, TIED, "0:3@0,1 | 3:8@2", fault=fault)
    with pytest.raises(AssertionError, match=r"(loss|norm) of iteration"):
        jobs.assert_same(jobs.merge(broken), expected)
