"""Every schedule trains through the loop, by its flags, as one worker does."""

from __future__ import annotations

import typing
from collections import defaultdict
from pathlib import Path

import pytest

from megatron_flex.arguments import parse
from megatron_flex.config.flexpipe import Schedule
from megatron_flex.loop.assemble import assemble
from megatron_flex.loop.setup import planner_setup
from megatron_flex.planner.flops import cost_coefficients
from megatron_flex.planner.plan import Plan
from megatron_flex.report.gantt import Gantt, Replanner, actual, planned_in_trace
from megatron_flex.report.read import read_trace
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


def operations(course: Gantt) -> dict[int, list[tuple[int, int, int]]]:
    """Of each worker: kind, stage and micro-batch of what it computes, in the order of time."""
    found = defaultdict(list)
    for span in sorted(course.spans, key=lambda s: s.start):
        if span.kind < 4:
            found[span.worker].append((span.kind, span.stage, span.micro_batch))
    return found


def assert_as_simulated(trace: Path, run: runs.Run, again: Replanner | None = None) -> None:
    """All workers ran in the order of the placement whose time was logged.

    ``again``: which is what the planner's code makes of the plan and the batch.
    """
    courses = read_trace(trace)
    for record in run.history.iterations:
        events = courses[record.iteration]
        told = planned_in_trace(events)
        assert told is not None
        ran = operations(actual(events))
        assert ran == operations(told)
        about = next(e["args"] for e in events if e["name"] == "iteration")
        seconds = record.extra["predicted-program"]
        assert about["seconds"] == seconds
        assert told.seconds <= seconds
        if again is not None:
            facts = {"iteration": record.iteration, "plan": record.plan, **record.lists}
            simulated = again.gantt(facts)
            assert ran == operations(simulated)
            assert simulated.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_static_pipeline_under_every_schedule_equals_one_worker(
    workers: WorkerPool, data: str, alone: runs.Run, name: str, tmp_path: Path
) -> None:
    words = ["--pipeline-model-parallel-size", "2", "--flexpipe-schedule", name]
    if name == "interleaved":
        words += ["--num-virtual-stages-per-pipeline-rank", "2"]
    argv = flags(data, *words, "--flexpipe-trace", str(tmp_path / "trace"))
    run = runs.run(workers, 2, argv)
    runs.assert_same(run, alone)
    config = parse(argv, world_size=2)
    parts = assemble(config)
    setup = planner_setup(config, parts, 2, cost_coefficients(parts.model))
    assert_as_simulated(tmp_path / "trace", run, Replanner(setup.to_json()))
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
    workers: WorkerPool, data: str, alone: runs.Run, name: str, tmp_path: Path
) -> None:
    words = ["--flexpipe", "--flexpipe-schedule", name, "--flexpipe-trace", str(tmp_path / "trace")]
    run = runs.run(workers, 3, flags(data, *words))
    runs.assert_same(run, alone)
    assert_as_simulated(tmp_path / "trace", run)


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
