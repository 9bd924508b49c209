"""A split backward trains as one process does: input halves, then weight halves, in any order."""

from __future__ import annotations

import pytest

from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import MODELS

SPLIT = ["zb-h1", "zb-h2", "zb-v", "zb"]
V = "0:2@0 | 2:4@1 | 4:6@1 | 6:8@0"


@pytest.mark.parametrize("policy", SPLIT)
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_split(workers: WorkerPool, policy: str, model: str) -> None:
    plan = V if policy == "zb-v" else "0:3@0 | 3:8@1"
    expected = jobs.merge(workers.run(1, jobs.train, MODELS[model], "0:8@0", 6))
    got = jobs.merge(workers.run(2, jobs.train, MODELS[model], plan, 6, policy=policy))
    jobs.assert_same(got, expected)
    expected = jobs.merge(workers.run(1, jobs.train, MODELS[model], "0:8@0", 6, exact=True))
    got = jobs.merge(workers.run(2, jobs.train, MODELS[model], plan, 6, policy=policy, exact=True))
    jobs.assert_equal_bits(got, expected)
