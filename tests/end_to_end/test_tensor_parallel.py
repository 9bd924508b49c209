"""Runs whose workers share layers, by their flags: the training of one process."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs

LAST = 6
SHARED = "--tensor-model-parallel-size 2"
WAYS = {
    "shared rows": "--pipeline-model-parallel-size 2 --sequence-parallel --recompute-activations",
    "planned": "--flexpipe --flexpipe-slice-tokens 20 --use-distributed-optimizer",
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prefix = runs.write_documents(tmp_path_factory.mktemp("data") / "text")
    more = "--log-params-norm --log-num-zeros-in-grad --eval-interval 3 --eval-iters 1"
    data = f"--data-path {prefix} --split 8,2,0 --train-iters {LAST} {more}"
    return [*runs.MODEL, *runs.TRAINING, *shlex.split(data)]


@pytest.fixture(scope="module")
def alone(workers: WorkerPool, flags: list[str]) -> runs.Run:
    return runs.run(workers, 1, flags)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_equals_one_process(
    workers: WorkerPool, flags: list[str], alone: runs.Run, tmp_path: Path, way: str
) -> None:
    trace = tmp_path / "trace.json"
    argv = [*flags, *shlex.split(f"{SHARED} {WAYS[way]} --flexpipe-trace {trace}")]
    got = runs.run(workers, 4, argv)
    runs.assert_same(got, alone)
    for a, b in zip(got.history.iterations, alone.history.iterations, strict=True):
        # The gradient of the keys' bias is zero in theory: 32 numbers in each of 3 layers.
        assert a.num_zeros == pytest.approx(b.num_zeros, abs=96)
        assert a.params_norm == pytest.approx(b.params_norm, rel=1e-6)
    for mine, its in zip(got.history.validations, alone.history.validations, strict=True):
        assert mine.losses["lm loss"] == pytest.approx(its.losses["lm loss"], rel=1e-6)
    assert trace.exists()
