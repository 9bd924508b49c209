"""Samples cut to slices, under any plan and schedule, train as whole samples on one process do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_flex.data.cut import Cut
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.model.config import ModelConfig
from tests.distributed import jobs
from tests.distributed.pool import WorkerError, WorkerPool
from tests.distributed.test_exactness import TIED, UNTIED, reference
from tests.end_to_end import runs

LONGEST = 120
COST = CostCoefficients(1.0, 0.01)
ONE_BY_ONE = Cut(25, slice_tokens=1)
SEVEN, SIXTY_FOUR = Cut(100, slice_tokens=7), Cut(100, slice_tokens=64)
BY_COST = Cut(40, by_cost=True, sliced=True, cost=COST)
LONGER = Cut(100, slice_tokens=1000)
WHOLE = f"0:{TIED.layers.num_units}@0"


def same(
    workers: WorkerPool, config: ModelConfig, plan: str | list[str], size: int, cut: Cut,
    iterations: int = 6, longest: int = LONGEST, **options: Any,
) -> None:  # fmt: skip
    """As one process without slices."""
    whole = reference(workers, config, longest=longest, iterations=iterations)
    run = workers.run(size, jobs.train, config, plan, longest=longest, cut=cut,
                      iterations=iterations, **options)  # fmt: skip
    jobs.assert_same(jobs.merge(run), whole)


@pytest.mark.parametrize("cut", [SEVEN, SIXTY_FOUR, BY_COST, LONGER], ids=str)
@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_one_process_with_slices_equals_itself_without(
    workers: WorkerPool, config: ModelConfig, cut: Cut, count: Callable[[int, int], int]
) -> None:
    same(workers, config, WHOLE, 1, cut, iterations=count(4, 20))


def test_slices_of_one_token(workers: WorkerPool) -> None:
    same(workers, TIED, WHOLE, 1, ONE_BY_ONE, iterations=2, longest=30)


@pytest.mark.parametrize(
    ("policy", "plan", "size"),
    [
        ("seq1f1b", "0:3@0 | 3:6@1 | 6:8@2", 3),
        ("gpipe", "0:4@0 | 4:8@1", 2),
        ("1f1b", "0:4@0 | 4:8@1", 2),
        ("1f1b", "0:3@0 | 3:8@1,2", 3),
        ("interleaved", "0:2@0 | 2:4@1 | 4:6@0 | 6:8@1", 2),
        ("zb-h1", "0:2@0,1 | 2:5@2 | 5:8@3", 4),
        ("zb-h2", "0:3@0 | 3:6@1 | 6:8@2", 3),
        ("zb-v", "0:2@0 | 2:4@1 | 4:6@1 | 6:8@0", 2),
        ("v-half", "0:2@0 | 2:4@1 | 4:6@1 | 6:8@0", 2),
        ("v-min", "0:2@0 | 2:4@1 | 4:6@1 | 6:8@0", 2),
        ("zb", "0:1@2 | 1:7@0 | 7:8@2,3", 4),
        ("auto", "0:3@3 | 3:8@0,1,2", 5),
    ],
)
def test_every_schedule_equals_one_process(
    workers: WorkerPool, policy: str, plan: str, size: int, count: Callable[[int, int], int]
) -> None:
    config = UNTIED if size % 2 else TIED
    same(workers, config, plan, size, BY_COST, iterations=count(4, 20), policy=policy)


@pytest.mark.parametrize(
    ("memory", "policy"),
    [
        ("recompute 1-6", "zb"),
        ("activations 2-5", "1f1b"),
        ("activations 2-5", "zb"),
        ("optimizer 1-6", "zb"),
        ("recompute 1,2 ; shard 0-7", "1f1b"),
    ],
)
def test_memory_optimisation_with_slices(workers: WorkerPool, memory: str, policy: str) -> None:
    same(workers, TIED, f"0:4@0,1 | 4:8@2 ; {memory}", 3, BY_COST, iterations=3, policy=policy)


LAYOUTS = (
    "0:4@0,1 | 4:8@2,3", "0:2@0 | 2:5@1,2 | 5:8@3", "0:8@0,1,2,3", "0:3@3 | 3:8@0,1,2",
    "0:2@0 | 2:4@1 | 4:6@1 | 6:8@0",
)  # fmt: skip
POLICIES = ("zb", "1f1b", "auto", "gpipe")


def test_random_sequences_of_plans_cuts_and_policies_with_live_migration(
    workers: WorkerPool, count: Callable[[int, int], int]
) -> None:
    for seed in range(count(2, 40)):
        rng = np.random.default_rng(seed)
        plans = [
            f"{LAYOUTS[rng.integers(5)]} ; schedule {POLICIES[rng.integers(4)]}"
            f" ; cut {rng.integers(20, 120)}"
            for _ in range(8)
        ]
        cut = replace(BY_COST, tokens=None)
        config = UNTIED if seed % 4 > 1 else TIED
        same(workers, config, plans, 4, cut, iterations=8, migrate=bool(seed % 2),
             way=("early", "mixed", "late")[seed % 3])  # fmt: skip


def test_exact_sums_give_equal_bits_under_any_plan_at_one_cut(workers: WorkerPool) -> None:
    options: dict[str, Any] = {"longest": LONGEST, "cut": BY_COST, "iterations": 6, "exact": True}
    alone = jobs.merge(workers.run(1, jobs.train, TIED, WHOLE, **options))
    for plan, size, policy in (
        ("0:3@0 | 3:8@1,2", 3, "1f1b"),
        ("0:2@0 | 2:4@1 | 4:6@1 | 6:8@0", 2, "zb-v"),
    ):
        run = workers.run(size, jobs.train, TIED, plan, policy=policy, **options)
        jobs.assert_equal_bits(jobs.merge(run), alone)


def test_evaluations_of_slices_between_iterations(workers: WorkerPool) -> None:
    options: dict[str, Any] = {"longest": LONGEST, "iterations": 4, "evaluate": True}
    alone = jobs.merge(workers.run(1, jobs.train, TIED, WHOLE, **options))
    run = workers.run(2, jobs.train, TIED, "0:4@0 | 4:8@1", cut=BY_COST, **options)
    jobs.assert_same(jobs.merge(run), alone)


# ---- through the loop, by flags --------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.write_documents(tmp_path_factory.mktemp("slices") / "documents", longest=250)


def flags(data: str, *more: str) -> list[str]:
    words = [*runs.MODEL, *runs.TRAINING, "--train-iters", "4", "--data-path", data]
    return [*words, "--split", "1,0,0", "--seq-length", "256", *more]


@pytest.fixture(scope="module")
def alone(workers: WorkerPool, data: str) -> runs.Run:
    """One worker, whole samples."""
    return runs.run(workers, 1, flags(data))


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (1, ["--flexpipe-slice-tokens", "40"]),
        (2, ["--pipeline-model-parallel-size", "2", "--flexpipe-slice-tokens", "30"]),
        (3, ["--flexpipe", "--flexpipe-slice-tokens", "auto"]),
        (3, ["--flexpipe", "--flexpipe-slice-tokens", "0"]),
    ],
)
def test_flags_that_cut_samples_change_no_result(
    workers: WorkerPool, data: str, alone: runs.Run, size: int, words: list[str]
) -> None:
    run = runs.run(workers, size, flags(data, *words))
    runs.assert_same(run, alone)
    sliced = sum(r.extra["slices"] for r in run.history.iterations)
    assert (sliced > 0) is (words[-1] != "0")


def test_a_recorded_run_whose_planner_chose_the_cuts_replays_to_the_same_bits(
    workers: WorkerPool, data: str, alone: runs.Run, tmp_path: Path
) -> None:
    record = str(tmp_path / "plans.txt")
    free = [w for w in flags(data) if w not in _micro_batch_words(flags(data))]
    first = runs.run(workers, 2, [*free, "--flexpipe", "--flexpipe-record", record])
    text = Path(record).read_text()
    assert text.count("; cut ") == 4
    again = runs.run(workers, 2, [*free, "--flexpipe-plans", record])
    assert again.history.iterations[-1].losses == first.history.iterations[-1].losses
    runs.assert_same(first, alone)


@pytest.mark.parametrize("flag", ["--flexpipe-plan", "--flexpipe-plans"])
def test_a_flag_that_cuts_otherwise_than_the_plan_is_refused(
    workers: WorkerPool, data: str, tmp_path: Path, flag: str
) -> None:
    plan = "0:8@0 ; cut 64"
    (tmp_path / "plans.txt").write_text(plan)
    free = [w for w in flags(data) if w not in _micro_batch_words(flags(data))]
    given = [flag, plan if flag == "--flexpipe-plan" else str(tmp_path / "plans.txt")]
    for words in (
        ["--micro-batch-size", "2"],
        ["--micro-batch-tokens", "50"],
        ["--flexpipe-slice-tokens", "32"],
    ):
        with pytest.raises(WorkerError, match=f"{' '.join(words)} says otherwise") as caught:
            runs.run(workers, 1, [*free, *given, *words])
        assert caught.value.kind == "PlanError"
    runs.run(workers, 1, [*free, *given, "--micro-batch-tokens", "64"])


def _micro_batch_words(words: list[str]) -> set[str]:
    at = words.index("--micro-batch-tokens")
    return {words[at], words[at + 1]}


def test_bert_stays_whole_however_it_is_planned(workers: WorkerPool) -> None:
    alone = jobs.merge(workers.run(1, jobs.train, jobs.BERT, "0:6@0", 4, longest=90))
    cut = Cut(by_cost=True, sliced=False, cost=COST)
    plans = ["0:3@0 | 3:6@1 ; cut 30", "0:6@0,1 ; cut 70", "0:3@0 | 3:6@1 ; schedule zb ; cut 50"]
    run = workers.run(2, jobs.train, jobs.BERT, plans, 4, longest=90, cut=cut)
    jobs.assert_same(jobs.merge(run), alone)
