"""Every schedule trains through the loop, by its flags, as one worker does."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from megatron_flex.config.flexpipe import Schedule
from megatron_flex.planner.plan import Plan
from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs

SCHEDULES = typing.get_args(Schedule)
FLAGS = [*runs.MODEL, *runs.TRAINING, "--train-iters", "4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.write_documents(tmp_path_factory.mktemp("schedules") / "documents")


def flags(data: str, *more: str) -> list[str]:
    return [*FLAGS, "--data-path", data, "--split", "1,0,0", *more]


@pytest.fixture(scope="module")
def alone(workers: WorkerPool, data: str) -> runs.Run:
    """One worker, one stage."""
    return runs.run(workers, 1, flags(data))


def stages(run: runs.Run) -> list[tuple[int, ...]]:
    """Devices of each stage in the first iteration."""
    return [s.group for s in Plan.parse(run.history.iterations[0].plan).stages]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_static_pipeline_under_every_schedule_equals_one_worker(
    workers: WorkerPool, data: str, alone: runs.Run, name: str
) -> None:
    words = ["--pipeline-model-parallel-size", "2", "--flexpipe-schedule", name]
    if name == "interleaved":
        words += ["--num-virtual-stages-per-pipeline-rank", "2"]
    run = runs.run(workers, 2, flags(data, *words))
    runs.assert_same(run, alone)
    shape = {"interleaved": [(0,), (1,), (0,), (1,)]}
    if name in ("zb-v", "v-half", "v-min"):
        shape[name] = [(0,), (1,), (1,), (0,)]
    assert stages(run) == shape.get(name, [(0,), (1,)])


def test_virtual_stages_by_layers_and_by_a_layout_are_interleaved(
    workers: WorkerPool, data: str, alone: runs.Run
) -> None:
    for words in (
        ["--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"],
        ["--pipeline-model-parallel-layout", "Et|t|t|L"],
    ):
        run = runs.run(workers, 2, flags(data, "--pipeline-model-parallel-size", "2", *words))
        assert stages(run) == [(0,), (1,), (0,), (1,)]
        if "--num-layers" not in words:
            runs.assert_same(run, alone)


@pytest.mark.parametrize("name", ["auto", "zb-v", "interleaved"])
def test_a_planner_with_every_kind_of_schedule_equals_one_worker(
    workers: WorkerPool, data: str, alone: runs.Run, name: str
) -> None:
    run = runs.run(workers, 3, flags(data, "--flexpipe", "--flexpipe-schedule", name))
    runs.assert_same(run, alone)


def test_a_recorded_run_says_the_schedules_and_replays_to_the_same_bits(
    workers: WorkerPool, data: str, tmp_path: Path
) -> None:
    record = tmp_path / "plans.txt"
    budget = ["--flexpipe-memory-budget-gb", "0.0006"]
    first = runs.run(
        workers, 3, flags(data, "--flexpipe", "--flexpipe-record", str(record), *budget)
    )
    assert all("; schedule " in line for line in record.read_text().splitlines()[:1])
    second = runs.run(workers, 3, flags(data, "--flexpipe-plans", str(record), *budget))
    runs.assert_equal_bits(second, first)
