"""Micro-batches padded to a multiple train, on any plans, as one process does without padding."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np
import pytest

from megatron_flex.data.cut import Cut
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.planner.plan import Plan
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import TIED, UNTIED, reference
from tests.end_to_end import runs
from tests.unit.data.files import write_flat

LONGEST = 60
ITERATIONS = 4
MODELS = {"tied": TIED, "untied": UNTIED, "bert": jobs.BERT}
SLICES = Cut(48, by_cost=True, sliced=True, cost=CostCoefficients(1.0, 0.01), align=32)
PACKED = Cut(64, align=64)


@pytest.mark.parametrize(
    ("model", "policy", "plans", "size", "cut"),
    [
        ("tied", "1f1b", ["0:8@0"], 1, PACKED),
        ("tied", "1f1b", ["0:3@0 | 3:8@1", "0:5@1 | 5:8@0", "0:8@0,1"], 2, SLICES),
        ("untied", "zb-h1", ["0:3@0 | 3:8@1,2 ; recompute 1", "0:2@2 | 2:5@0 | 5:8@1"], 3, SLICES),
        ("untied", "1f1b", ["0:3@0 | 3:8@1,2 ; activations 2-5"], 3, Cut(count=3, align=16)),
        ("bert", "zb-h1", ["0:3@0,1 | 3:6@2", "0:6@1,2"], 3, PACKED),
        ("bert", "1f1b", ["0:3@0 | 3:6@1"], 2, Cut(100, 3, pad="batch", align=64)),
    ],
)
def test_any_plans_with_padding_equal_one_process_without(
    workers: WorkerPool, model: str, policy: str, plans: list[str], size: int, cut: Cut
) -> None:
    config = MODELS[model]
    whole = reference(workers, config, longest=LONGEST, iterations=ITERATIONS)
    run = workers.run(size, jobs.train, config, plans, longest=LONGEST, iterations=ITERATIONS,
                      policy=policy, cut=cut)  # fmt: skip
    jobs.assert_same(jobs.merge(run), whole)


def test_exact_sums_have_the_same_bits_on_any_plans(workers: WorkerPool) -> None:
    options: dict[str, Any] = {
        "longest": LONGEST,
        "iterations": ITERATIONS,
        "exact": True,
        "cut": PACKED,
    }
    whole = reference(workers, TIED, **options)
    plans = ["0:3@0 | 3:8@1", "0:5@1 | 5:8@0"]
    results, state = jobs.merge(workers.run(2, jobs.train, TIED, plans, policy="zb-h1", **options))
    assert [r.losses for r in results] == [r.losses for r in whole[0]]
    assert all(state[name].equal(tensor) for name, tensor in whole[1].items())


def test_flags_align_every_micro_batch_and_the_planner_counts_it(
    workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = np.random.default_rng(3)
    lengths = draw.integers(3, 60, 32)
    documents = [draw.integers(0, runs.VOCABULARY, n).tolist() for n in lengths]
    prefix = write_flat(tmp_path_factory.mktemp("aligned") / "text", documents)
    training = [w for w in runs.TRAINING if w not in ("--micro-batch-tokens", "50")]
    common = [*runs.MODEL, *training, *shlex.split(f"--data-path {prefix} --split 1,0,0"),
              *shlex.split("--train-iters 3 --flexpipe-memory-budget-gb 1")]  # fmt: skip
    plain = runs.run(workers, 1, [*common, "--micro-batch-tokens", "64"])
    found = runs.run(workers, 2, [*common, "--flexpipe", "--flexpipe-align-tokens", "16"])
    runs.assert_same(found, plain)
    for record in found.history.iterations:
        assert record.padding > 0
        assert (record.padding + record.tokens) % 16 == 0
        Plan.parse(record.plan)
