"""Runs whose optimizer state is split over replicas: the same training, the same checkpoints."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_flex.planner.plan import Plan
from tests.close import assert_numbers_close
from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs

LAST = 6
SHARDED = "--use-distributed-optimizer"
BITWISE = "--flexpipe-bitwise"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prefix = runs.write_documents(tmp_path_factory.mktemp("data") / "text")
    data = shlex.split(f"--data-path {prefix} --split 1,0,0 --train-iters {LAST}")
    return [*runs.MODEL, *runs.TRAINING, *data]


def contents(directory: Path) -> dict[str, bytes]:
    """The tensors of a checkpoint: its other files name arguments, and the save."""
    files = (p for p in directory.rglob("*") if p.suffix == ".distcp")
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


@pytest.mark.parametrize("more", [[], ["--bf16", "--untie-embeddings-and-output-weights"]])
def test_a_sharded_run_writes_the_checkpoint_of_one_that_is_not_and_others_go_on_from_it(
    workers: WorkerPool, flags: list[str], tmp_path: Path, more: list[str]
) -> None:
    here = [*flags, BITWISE, *more, "--log-params-norm", "--log-num-zeros-in-grad"]
    plain, split = tmp_path / "plain", tmp_path / "split"
    save = ["--save-interval", "3", "--flexpipe-plan", "0:4@0,1,2 | 4:8@0,1"]
    expected = runs.run(workers, 3, [*here, *save, "--save", str(plain)])
    got = runs.run(workers, 3, [*here, *save, "--save", str(split), SHARDED])
    runs.assert_equal_bits(got, expected)
    for a, b in zip(got.history.iterations, expected.history.iterations, strict=True):
        assert (a.losses, a.grad_norm, a.num_zeros) == (b.losses, b.grad_norm, b.num_zeros)
        assert_numbers_close(a.params_norm, b.params_norm, 1e-6)
    saved = contents(plain)
    assert saved
    assert contents(split) == saved
    for size, plan in ((1, ""), (2, SHARDED), (4, f"--pipeline-model-parallel-size 2 {SHARDED}")):
        argv = [*here, *shlex.split(plan), "--load", str(split), "--ckpt-step", "3"]
        runs.assert_equal_bits(runs.run(workers, size, argv), expected)


@pytest.mark.parametrize("way", ["live", "handover", "stall"])
def test_every_way_of_switching_cuts_parts_anew(
    workers: WorkerPool, flags: list[str], tmp_path: Path, way: str
) -> None:
    plans = tmp_path / "plans.txt"
    plans.write_text(
        "0:4@0,1 | 4:8@2 ; shard 0-7\n"
        "0:4@0,1 | 4:8@2 ; shard 0-7\n"
        "0:4@0 | 4:8@1,2 ; shard 0-7\n"
        "0:8@0,1,2\n"
        "0:8@0,1,2 ; shard 0-7\n"
        "0:8@2,1 ; shard 1-5\n"
    )
    expected = runs.run(workers, 1, [*flags, BITWISE])
    argv = [*flags, BITWISE, "--flexpipe-plans", str(plans), "--flexpipe-switch", way]
    got = runs.run(workers, 3, [*argv, "--flexpipe-no-twin"])
    assert got.losses == expected.losses
    assert all(got.state[name].equal(tensor) for name, tensor in expected.state.items())


def test_the_planner_shards_where_it_is_allowed_to(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    record = tmp_path / "plans.txt"
    # With a split backward in a V these samples go through single workers.
    more = ["--flexpipe-record", str(record), "--flexpipe-schedule", "1f1b"]
    argv = [*flags, BITWISE, "--flexpipe", SHARDED, *more]
    got = runs.run(workers, 3, argv)
    assert got.losses == runs.run(workers, 1, [*flags, BITWISE]).losses
    lines = record.read_text().splitlines()
    plans = [Plan.parse(line.partition("#")[0].partition("~")[0]) for line in lines]
    assert all(plan == plan.sharded() for plan in plans)
    assert any(plan.o_plan.shard for plan in plans), plans
