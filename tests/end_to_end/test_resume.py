"""Interrupted and resumed is uninterrupted: the whole loop, with data, scheduler and dropout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs

UNEVEN = "0:3@0,1 | 3:8@2"
LAST = 10


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Ten iterations of 8 samples on 50 documents: the second epoch begins within the seventh."""
    prefix = runs.write_documents(tmp_path_factory.mktemp("data") / "text")
    data = ["--data-path", prefix, "--split", "1,0,0", "--train-iters", str(LAST)]
    return [*runs.MODEL, *runs.TRAINING, *data]


def saving(directory: Path, *more: str) -> list[str]:
    return ["--save", str(directory), "--load", str(directory), "--save-interval", "100", *more]


@pytest.mark.parametrize(
    ("interrupted", "more"),
    [
        (3, ()),
        (7, ("--position-embedding-type", "rope", "--swiglu", "--normalization", "RMSNorm")),
        (5, ("--bf16", "--untie-embeddings-and-output-weights")),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    workers: WorkerPool, flags: list[str], tmp_path: Path, interrupted: int, more: tuple[str, ...]
) -> None:
    layout = ["--flexpipe-plan", UNEVEN, *more]
    whole = runs.run(workers, 3, [*flags, *layout])
    here = [*flags, *layout, *saving(tmp_path)]
    first = runs.run(workers, 3, [*here, "--exit-interval", str(interrupted)])
    assert first.progress["iteration"] == interrupted
    assert f" exiting program at iteration {interrupted}" in first.printed
    rest = runs.run(workers, 3, here)
    assert first.losses + rest.losses == whole.losses
    assert first.norms + rest.norms == whole.norms
    rates = [r.learning_rate for run in (first, rest) for r in run.history.iterations]
    assert rates == [r.learning_rate for r in whole.history.iterations]
    runs.assert_equal_bits(rest, whole)


def test_a_run_saved_by_three_workers_goes_on_alike_on_one_two_four_and_five(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    layout = ["--flexpipe-plan", UNEVEN]
    whole = runs.run(workers, 3, [*flags, *layout])
    runs.run(workers, 3, [*flags, *layout, *saving(tmp_path, "--exit-interval", "5")])
    for size, plan in (
        (1, "0:8@0"),
        (2, "0:6@1 | 6:8@0"),
        (4, "0:2@0 | 2:4@1 | 4:8@2,3"),
        (5, "0:1@4 | 1:4@0,1 | 4:8@2,3"),
    ):
        resumed = runs.run(
            workers, size, [*flags, "--flexpipe-plan", plan, "--load", str(tmp_path)]
        )
        assert len(resumed.losses) == LAST - 5
        runs.assert_same(resumed, whole, start=5)


def test_an_evaluation_leaves_no_trace_in_training(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    prefix = runs.write_documents(tmp_path / "valid", count=3)
    layout = ["--pipeline-model-parallel-size", "2"]
    whole = runs.run(workers, 2, [*flags, *layout])
    split = flags.index("--split")
    data = [
        *flags[:split - 2], "--train-data-path", flags[split - 1], "--valid-data-path", prefix,
        *flags[split + 2 :],
    ]  # fmt: skip
    evaluated = runs.run(workers, 2, [*data, *layout, "--eval-interval", "3", "--eval-iters", "2"])
    assert evaluated.losses == whole.losses
    runs.assert_equal_bits(evaluated, whole)
    # Three validations and the one at the end, each on the three rows that there are.
    assert [v.samples for v in evaluated.history.validations] == [3, 3, 3, 3]
    assert any("all 3 samples there are" in line for line in evaluated.printed)


def test_a_finished_run_that_is_started_again_trains_nothing_and_keeps_its_checkpoint(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    here = [*flags, *saving(tmp_path)]
    whole = runs.run(workers, 1, here)
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    again = runs.run(workers, 1, here)
    assert again.losses == []
    runs.assert_equal_bits(again, whole)
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


def test_finetuning_starts_anew_from_the_weights(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    whole = runs.run(workers, 1, [*flags, *saving(tmp_path)])
    tuned = runs.run(workers, 2, [*flags, "--load", str(tmp_path), "--finetune"])
    assert len(tuned.losses) == LAST
    assert tuned.progress["consumed_samples"] == whole.progress["consumed_samples"]
    assert tuned.losses[0] < whole.losses[0]


def test_a_bfloat16_run_goes_on_from_weights_that_were_loaded_alone(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    words = [*flags, "--bf16", "--lr-warmup-iters", "0"]
    whole = runs.run(workers, 1, [*words, *saving(tmp_path)])
    # Steps far below a weight's last bit: an update rounds the master weights and no more.
    still = ["--train-iters", "2", "--lr", "1e-12", "--min-lr", "0", "--finetune"]
    tuned = runs.run(workers, 2, [*words, *still, "--load", str(tmp_path)])
    loaded = {n: t for n, t in whole.state.items() if not n.startswith("optimizer.")}
    assert loaded
    for name, weight in loaded.items():
        error = (tuned.state[name].double() - weight.double()).abs().max()
        assert error <= 1e-9, f"{name} differs by {error:.1e}"
