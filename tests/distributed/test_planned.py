"""Training with a planner: live switches that the data cause, and a planner that fails."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_flex.arguments import parse
from megatron_flex.cluster.cluster import load
from megatron_flex.config.config import Architecture
from megatron_flex.data.batches import BatchSource
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.loop import desk, planned
from megatron_flex.loop.assemble import assemble
from megatron_flex.loop.desk import Desk
from megatron_flex.loop.planner_process import PlannerProcess
from megatron_flex.loop.plans import Choice
from megatron_flex.loop.setup import planner_setup
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.flops import cost_coefficients
from megatron_flex.planner.messages import Question, Task
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.service import Service
from megatron_flex.telemetry.record import IterationRecord
from megatron_flex.training import Trainer
from tests.close import assert_numbers_close
from tests.distributed.pool import WorkerError, WorkerPool
from tests.end_to_end import runs

# The longest samples (60 tokens, a micro-batch of their own) decide which layouts fit.
FLAGS = [*runs.MODEL, *runs.TRAINING, "--train-iters", "10", "--flexpipe-lookahead", "2"]
BUDGET = "0.00060"  # 10^9 bytes: one worker cannot hold the model, and long batches need more


def flags(data: str, *more: str, budget: str = BUDGET) -> list[str]:
    return [*FLAGS, "--data-path", data, "--split", "1,0,0", "--flexpipe",
            "--flexpipe-memory-budget-gb", budget, *more]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.write_documents(tmp_path_factory.mktemp("planned") / "documents")


@pytest.fixture(scope="module")
def undisturbed(workers: WorkerPool, data: str) -> runs.Run:
    """One worker, one plan."""
    plain = [*runs.MODEL, *runs.TRAINING, "--train-iters", "10", "--data-path", data,
             "--split", "1,0,0"]  # fmt: skip
    return runs.run(workers, 1, plain)


def plans_of(run: runs.Run) -> list[Plan]:
    return [Plan.parse(r.plan) for r in run.history.iterations]


def patient(argv: Sequence[str], architecture: Architecture) -> runs.Run:
    """A run that waits for every decision, however busy the machine is."""
    before, desk.PATIENCE = desk.PATIENCE, 30.0
    try:
        return runs.train(argv, architecture)
    finally:
        desk.PATIENCE = before


@pytest.mark.parametrize("planner", ["lookahead", "hbsa"])
def test_planned_training_switches_and_equals_one_worker(
    workers: WorkerPool, data: str, undisturbed: runs.Run, planner: str
) -> None:
    # With a whole backward, layouts pay that a split one in a V makes good without a switch.
    fused = ["--flexpipe-schedule", "1f1b", "--flexpipe-simulations", "100"]
    run = runs.run(workers, 3, flags(data, "--flexpipe-planner", planner, *fused), job=patient)
    runs.assert_same(run, undisturbed)
    decided = [r for r in run.history.iterations if r.notes.get("action")]
    assert len(decided) >= len(run.history.iterations) - 1
    if planner == "lookahead":
        assert len({p.stages for p in plans_of(run)}) > 1, "the data caused no switch"


def test_a_recorded_run_replays_to_the_same_bits(
    workers: WorkerPool, data: str, tmp_path: Path
) -> None:
    record = tmp_path / "plans.txt"
    first = runs.run(workers, 3, flags(data, "--flexpipe-record", str(record)))
    script = [*runs.MODEL, *runs.TRAINING, "--train-iters", "10", "--data-path", data, "--split",
              "1,0,0", "--flexpipe-plans", str(record),
              "--flexpipe-memory-budget-gb", BUDGET]  # fmt: skip
    second = runs.run(workers, 3, script)
    assert plans_of(second) == plans_of(first)
    runs.assert_equal_bits(second, first)


def assert_as_predicted(records: Sequence[IterationRecord], tolerance: float) -> None:
    """The memory of every iteration is what was predicted."""
    for record in records:
        near = pytest.approx(record.extra["memory-predicted"], rel=tolerance)
        assert record.extra["memory-measured"] == near


def test_batches_that_fit_no_layout_train_with_memory_optimisation_within_the_budget(
    workers: WorkerPool, data: str, undisturbed: runs.Run
) -> None:
    run = runs.run(workers, 3, flags(data, budget="0.00037"))
    runs.assert_same(run, undisturbed)
    records = run.history.iterations
    assert all(plan.o_plan for plan in plans_of(run))
    assert_as_predicted(records, 0.05)
    for record in records:
        assert record.extra["memory-over-budget"] == 0.0
        assert 0.0 < record.extra["memory-measured"] <= 370_000
        assert "/" in record.notes["memory predicted/measured (MB)"]
        assert "iterations over the memory budget" not in record.notes


def smallest_budget(argv: list[str], world_size: int, batches: int) -> float:
    """Bytes of a worker with which each of the first batches fits some plan, to 1 %."""
    config = parse(argv, world_size=world_size)
    parts = assemble(config)
    assert parts.train is not None
    setup = planner_setup(config, parts, world_size, cost_coefficients(parts.model))
    size = config.training.global_batch_size
    listed = [tuple(parts.train.batch(i * size, size).lengths.tolist()) for i in range(batches)]
    listed = sorted(set(listed), key=max)[-12:]  # those with the longest samples
    # Whether anything fits needs no search for the best.
    options = replace(setup.options, simulations=0)
    enough = 1e5
    for lengths in reversed(listed):  # the others mostly fit into what the first one needs
        service = Service(replace(setup, options=replace(options, budget=int(enough))))
        answer = service.answer(Question(0, (lengths,)))
        if answer.problem:
            enough = 1e9 * float(advised(answer.problem))
    return enough


def advised(text: str) -> str:
    """The budget that a refusal names."""
    found = re.search(r"would do is \S+ MB \(--flexpipe-memory-budget-gb (\S+)\)", text)
    assert found, text
    return found[1]


def test_a_tight_budget_is_never_exceeded(
    workers: WorkerPool, data: str, count: Callable[[int, int], int]
) -> None:
    iterations = count(30, 2000)
    argv = [*flags(data), "--train-iters", str(iterations), "--micro-batch-tokens", "120"]
    budget = 1.05 * smallest_budget(argv, 3, iterations)
    argv[argv.index(BUDGET)] = f"{budget / 1e9:.9f}"
    run = runs.run(workers, 3, argv, timeout=4000.0)
    records = run.history.iterations
    assert len(records) == iterations
    optimised = sum(bool(plan.o_plan) for plan in plans_of(run))
    assert optimised >= 0.2 * iterations
    over = [r.iteration for r in records if r.extra["memory-over-budget"]]
    assert not over, f"budget {budget:.0f}, iterations {over}"
    of_workers = ("memory-by-worker", "memory-predicted-by-worker")
    pairs = [pair for r in records for pair in zip(*map(r.lists.get, of_workers), strict=True)]
    assert sum(abs(used / said - 1) <= 0.05 for used, said in pairs) >= 0.95 * len(pairs)


def test_split_backwards_fill_a_budget_and_keep_to_it(workers: WorkerPool, data: str) -> None:
    argv = flags(data, "--train-iters", "20", "--flexpipe-simulations", "50", budget="0.00055")
    run = runs.run(workers, 3, argv)
    filled, split = [], []
    for record, plan in zip(run.history.iterations, plans_of(run), strict=True):
        assert record.extra["memory-over-budget"] == 0.0
        if plan.schedule == "zb":
            filled.append(record.extra["memory-predicted"] / 550_000)
            split.append(record)
    assert len(filled) >= 5
    assert max(filled) > 0.9
    assert_as_predicted(split, 0.02)


def test_iterations_over_the_budget_are_counted_and_said(workers: WorkerPool, data: str) -> None:
    plain = [*runs.MODEL, *runs.TRAINING, "--train-iters", "3", "--data-path", data, "--split",
             "1,0,0", "--flexpipe-memory-budget-gb", "0.0005"]  # fmt: skip
    records = runs.run(workers, 1, plain).history.iterations
    assert [r.extra["memory-over-budget"] for r in records] == [1.0] * 3
    assert [r.notes["iterations over the memory budget"] for r in records] == ["1", "2", "3"]


def test_a_batch_that_fits_nowhere_is_refused_before_it_runs(
    workers: WorkerPool, data: str
) -> None:
    with pytest.raises(WorkerError, match="no plan fits") as caught:
        workers.run(3, runs.train, tuple(flags(data, budget="0.0001")))
    text = str(caught.value)
    assert re.search(r"device \d needs [\d.]+ [kM]B with recompute and offload", text)
    assert caught.value.kind == "PlanError"
    one = ["--train-iters", "1", "--lr-warmup-iters", "0"]  # what the refusal had seen
    run = runs.run(workers, 3, flags(data, *one, budget=advised(text)))
    assert len(run.losses) == 1


def disturbed(argv: Sequence[str], number: int) -> runs.Run:
    """Train, and send the planner's process a signal after the third iteration."""
    step = Trainer._step

    def disturb(trainer: Trainer, *arguments: object) -> object:
        result = step(trainer, *arguments)  # type: ignore[arg-type]
        leader = trainer.steps._leader
        pid = None if leader is None else leader.desk.pid
        if trainer.progress.iteration == 3 and pid is not None:
            os.kill(pid, number)
        return result

    Trainer._step = disturb  # type: ignore[method-assign, assignment]
    try:
        return runs.train(argv)
    finally:
        Trainer._step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_training_goes_on_without_its_planner(
    workers: WorkerPool, data: str, undisturbed: runs.Run, number: signal.Signals
) -> None:
    accounts = workers.run(2, disturbed, tuple(flags(data, budget="1")), int(number))
    run = accounts[0]
    # The plans of the next two iterations may have been decided when the signal came.
    late = plans_of(run)[5:]
    assert {p.stages for p in late} == {late[0].stages}
    assert all(r.notes.get("action", "") == "" for r in run.history.iterations[6:])
    lost, kept = ([loss for (loss,) in r.losses] for r in (run, undisturbed))
    assert_numbers_close(lost, kept, 2e-7)


def looked_at(argv: Sequence[str]) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
    """Train; the sample lengths of each iteration, as the planner was asked and as trained on."""
    asked: dict[int, tuple[int, ...]] = {}
    trained: dict[int, tuple[int, ...]] = {}
    ask, step = PlannerProcess.ask, Trainer._step

    def note_question(process: PlannerProcess, question: Question | Task) -> None:
        assert isinstance(question, Question), "the planner makes the programs unasked"
        asked[question.iteration] = question.window[0]
        ask(process, question)

    def note_batch(trainer: Trainer, source: BatchSource, batch: GlobalBatch) -> object:
        trained[trainer.progress.iteration] = tuple(batch.lengths.tolist())
        return step(trainer, source, batch)

    PlannerProcess.ask = note_question  # type: ignore[method-assign, assignment]
    Trainer._step = note_batch  # type: ignore[method-assign, assignment]
    try:
        runs.train(argv)
    finally:
        PlannerProcess.ask, Trainer._step = ask, step  # type: ignore[method-assign]
    return asked, trained


def test_after_a_change_of_batch_size_the_planner_looks_at_the_batches_that_come(
    workers: WorkerPool, data: str, tmp_path: Path
) -> None:
    stored = ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "3"]
    first = flags(data, *stored, "--train-iters", "3", budget="1")
    workers.run(1, looked_at, tuple(first))
    more = ["--global-batch-size", "12", "--override-opt_param-scheduler"]
    asked, trained = workers.run(1, looked_at, tuple(flags(data, *stored, *more, budget="1")))[0]
    assert min(trained) == 3
    compared = sorted(asked.keys() & trained.keys())
    assert len(compared) > 2
    for iteration in compared:
        assert asked[iteration] == trained[iteration], f"iteration {iteration}"


def unanswered(argv: Sequence[str]) -> runs.Run:
    """Train with a planner that is always late."""
    answer = Desk.answer
    Desk.answer = lambda *_: None  # type: ignore[method-assign]
    try:
        return runs.train(argv)
    finally:
        Desk.answer = answer  # type: ignore[method-assign]


def test_without_answers_batches_that_do_not_fit_the_plan_before_get_another(
    workers: WorkerPool, data: str, undisturbed: runs.Run
) -> None:
    # No worker has memory for the whole model, which the first plan gives to each.
    run = workers.run(3, unanswered, tuple(flags(data, budget="0.00044")))[0]
    plans = plans_of(run)
    assert len(plans) == 10
    assert len(plans[0].stages) > 1
    assert any(not r.notes.get("action") for r in run.history.iterations), "no plan was kept"
    lost, kept = ([loss for (loss,) in r.losses] for r in (run, undisturbed))
    assert_numbers_close(lost, kept, 2e-7)


def test_without_its_planner_a_batch_that_fits_nowhere_ends_the_run(
    workers: WorkerPool, data: str
) -> None:
    with pytest.raises(WorkerError, match="the planner gave no plan for iteration"):
        workers.run(2, starved, tuple(flags(data, "--max-sample-length", "63", budget="0.0007")))


def starved(argv: Sequence[str]) -> runs.Run:
    """Train with a planner that is killed, in a layout that does not fit."""
    keep = planned.PlannedPlans._keep

    def tight(plans: planned.PlannedPlans, iteration: int) -> Choice:
        options = plans._desk.setup.options
        object.__setattr__(options, "budget", 1000)
        return keep(plans, iteration)

    planned.PlannedPlans._keep = tight  # type: ignore[method-assign, assignment]
    try:
        return disturbed(argv, signal.SIGKILL)
    finally:
        planned.PlannedPlans._keep = keep  # type: ignore[method-assign]


def test_a_profile_of_another_model_is_refused_and_of_another_machine_warned_of(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    words = flags(data, "--flexpipe-profile", str(path))
    model = assemble(parse(flags(data))).model
    profile = replace(closed_form_profile(model, load("cpux1")), machine="Another CPU")
    profile.save(path)
    assemble(parse(words))
    assert "was measured on Another CPU, and this is" in capsys.readouterr().err
    replace(profile, machine="").save(path)
    assemble(parse(words))
    assert not capsys.readouterr().err
    other = replace(model, swiglu=True)
    closed_form_profile(other, load("cpux1")).save(path)
    with pytest.raises(PlanError, match="swiglu is True in the profile and False here"):
        assemble(parse(words))
