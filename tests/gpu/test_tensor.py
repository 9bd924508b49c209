"""Workers that share layers: over NCCL with a GPU each, over gloo on one GPU.

Where there are not GPUs enough, a group of one shows that NCCL takes what is asked of it.
"""

from __future__ import annotations

import shlex
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_flex.model.tensor_group import TensorGroup
from megatron_flex.runtime.groups import ReductionGroups, make_group
from tests.close import assert_numbers_close
from tests.gpu.launch import SECONDS, Launch, flags_of, losses_on_the_cpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ITERATIONS = 8
TOLERANCE = 1e-4
LIMIT = timedelta(seconds=60)
SHARED = "--tensor-model-parallel-size 2"
# Devices of two workers: stages, replicas, states that move, splits and recompute.
CHANGING = (
    "0:4@0 | 4:8@1 ; recompute 1 ; schedule zb-h1\n"
    "0:8@0,1 ; shard 0-7\n"
    "0:2@1 | 2:4@0 | 4:6@1 | 6:8@0 ; schedule interleaved\n"
)
WAYS = {
    "whole rows": (2, SHARED),
    "shared rows": (2, f"{SHARED} --sequence-parallel --recompute-activations"),
    "bitwise": (2, f"{SHARED} --sequence-parallel --flexpipe-bitwise"),
    "changing": (4, f"{SHARED} --flexpipe-plans {{plans}}"),
    "changing, shared rows": (4, f"{SHARED} --sequence-parallel --flexpipe-plans {{plans}}"),
    "changing, alone": (2, "--flexpipe-plans {plans}"),
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return flags_of(tmp_path_factory.mktemp("data"), ITERATIONS)


@pytest.fixture(scope="module")
def expected(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_on_the_cpu(tmp_path_factory.mktemp("cpu"), flags, ITERATIONS)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("way", WAYS)
def test_shared_layers_train_as_one_worker_on_the_cpu(
    flags: list[str], expected: list[float], tmp_path: Path, way: str, backend: str
) -> None:
    size, more = WAYS[way]
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    plans = tmp_path / "plans.txt"
    plans.write_text(ITERATIONS * CHANGING)
    words = shlex.split(more.format(plans=plans))
    with Launch(tmp_path, [*flags, *words, "--distributed-backend", backend], size=size) as job:
        job.wait(SECONDS)
        assert_numbers_close(job.losses(), expected, TOLERANCE)


def test_nccl_takes_the_exchanges_of_a_group_while_something_is_computed() -> None:
    made = make_group(dist.HashStore(), 0, 1, "nccl", LIMIT, urgent=True)
    group = TensorGroup(0, 1, made, scatters=True)
    a = torch.randn(2048, 2048, device="cuda")
    expected = a @ a
    for _ in range(20):
        # Each is asked for while its operand is not there yet, and beside another product.
        sums = [group.begin_sum(a @ a), group.begin_shared_sum(a @ a)]
        beside = a @ a
        for begun in sums:
            assert begun.wait().equal(expected)
        assert group.gather(a @ a).equal(expected)
        assert beside.equal(expected)
    made.shutdown()


def test_nccl_takes_reductions_in_groups_that_come_and_go() -> None:
    groups = ReductionGroups(0, dist.HashStore(), "nccl", LIMIT, capacity=1)
    for ranks in ((0,), (1,), (0,), (1, 2), (0,)):
        groups.prepare([ranks])
        if ranks != (0,):
            continue
        x = torch.randn(1024, device="cuda")
        expected = x.clone()
        for begun in (groups.all_reduce(x, ranks), groups.reduce_scatter(x, ranks)):
            begun.wait()
        for begun in groups.all_gather(x, ranks):
            begun.wait()
        assert x.equal(expected)
    groups.close()
