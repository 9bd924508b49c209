"""Memory optimisation changes what a worker keeps, never what it computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_flex.model.config import ModelConfig
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import TIED, UNTIED

DROPPING = replace(TIED, hidden_dropout=0.1, attention_dropout=0.1)
ITERATIONS = 5


def run(workers: WorkerPool, config: ModelConfig, plan: str, size: int, **options: object) -> jobs.Merged:
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
