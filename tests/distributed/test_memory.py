"""Memory optimisation changes what a worker keeps, never what it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_flex.model.config import ModelConfig
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import TIED, UNTIED

DROPPING = replace(TIED, hidden_dropout=0.1, attention_dropout=0.1)
ITERATIONS = 3


def run(
    workers: WorkerPool, config: ModelConfig, plan: str, size: int, **options: Any
) -> jobs.Merged:
    return jobs.merge(workers.run(size, jobs.train, config, plan, ITERATIONS, **options))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("config", "plan", "size"),
    [
        (DROPPING, "0:4@0 | 4:8@1", 2),
        (UNTIED, "0:2@0 | 2:5@1 | 5:8@0", 2),
        (jobs.BERT, "0:6@0", 1),
    ],
)
def test_recompute_gives_the_same_bits(
    workers: WorkerPool, config: ModelConfig, plan: str, size: int, exact: bool
) -> None:
    expected = run(workers, config, plan, size, exact=exact)
    last = config.layers.num_units - 1
    # A head that is recomputed adds to a tied embedding by itself: another order of sums.
    for units in ("1-3", f"0-{last}" if exact else f"1-{last - 1}"):
        got = run(workers, config, f"{plan} ; recompute {units}", size, exact=exact)
        jobs.assert_equal_bits(got, expected)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("config", "plan", "size"),
    [(UNTIED, "0:4@0 | 4:8@1", 2), (DROPPING, "0:8@0", 1)],
)
def test_optimizer_state_on_the_host_gives_the_same_bits(
    workers: WorkerPool, config: ModelConfig, plan: str, size: int, exact: bool
) -> None:
    expected = run(workers, config, plan, size, exact=exact)
    for units in ("2,3", f"0-{config.layers.num_units - 1}"):
        got = run(workers, config, f"{plan} ; optimizer {units}", size, exact=exact)
        jobs.assert_equal_bits(got, expected)


@pytest.mark.parametrize("way", ["early", "late", "mixed"])
def test_memory_optimisation_changes_from_iteration_to_iteration(
    workers: WorkerPool, way: str
) -> None:
    layouts = ["0:4@0 | 4:8@1", "0:8@0,1", "0:3@1 | 3:8@0", "0:8@1"]
    o_plans = ["", " ; recompute 1-3 ; optimizer 2-5", " ; optimizer 0-7", " ; recompute 4,6"]
    plans = [layouts[i // 2 % 4] + o_plans[i % 4] for i in range(8)]
    expected = jobs.merge(workers.run(1, jobs.train, TIED, "0:8@0", 8, exact=True))
    got = jobs.merge(workers.run(2, jobs.train, TIED, plans, 8, exact=True, way=way))
    jobs.assert_equal_bits(got, expected)


@pytest.mark.parametrize(
    ("config", "plan", "size", "policy"),
    [
        (DROPPING, "0:4@0 | 4:8@1", 2, "gpipe"),
        (UNTIED, "0:2@0 | 2:5@1 | 5:8@2", 3, "1f1b"),
        (jobs.BERT, "0:6@0", 1, "gpipe"),
    ],
)
def test_activations_on_the_host_give_the_same_bits(
    workers: WorkerPool, config: ModelConfig, plan: str, size: int, policy: str
) -> None:
    expected = run(workers, config, plan, size, policy=policy, longest=120)
    last = config.layers.num_units - 1
    for optimisation in (f"activations 0-{last}", "recompute 1,3 ; activations 2,4"):
        got = run(workers, config, f"{plan} ; {optimisation}", size, policy=policy, longest=120)
        jobs.assert_equal_bits(got, expected)
