"""Costs that a run measures itself: kept for the next, and without effect on what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flex.arguments import ArgumentsError, parse
from megatron_flex.cluster.profile import Profile
from megatron_flex.loop.measuring import FILE
from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs

MEASURED = ["--flexpipe", "--flexpipe-profile", "measure", "--flexpipe-simulations", "4"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = runs.write_documents(tmp_path_factory.mktemp("data") / "data")
    return [*runs.MODEL, *runs.TRAINING, "--data-path", data, "--split", "1,0,0"]


def test_what_is_measured_is_kept_and_changes_no_loss(
    workers: WorkerPool, words: list[str], tmp_path: Path
) -> None:
    place = ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "2"]
    alone = runs.run(workers, 1, [*words, "--train-iters", "4"])
    first = [*words, *MEASURED, *place, "--train-iters", "4"]
    begun = runs.run(workers, 2, [*first, "--exit-interval", "2"])
    kept = tmp_path / FILE
    profile = Profile.load(kept)
    profile.check_model(begun.model)
    assert set(profile.links) == {"host", "intra"}
    assert profile.tokens[0] < profile.tokens[1]
    assert all(k.forward(64, 64 * 64) > 0 for k in profile.kinds.values())
    before = kept.stat().st_mtime_ns
    ended = runs.run(workers, 2, first)
    assert kept.stat().st_mtime_ns == before, "measured again"
    runs.assert_same(ended, alone, start=2)


def test_workers_that_share_layers_measure_together(
    workers: WorkerPool, words: list[str], tmp_path: Path
) -> None:
    shared = [*MEASURED, "--tensor-model-parallel-size", "2", "--save", str(tmp_path)]
    shared += ["--train-iters", "4", "--exit-interval", "1"]
    runs.run(workers, 4, [*words, *shared])
    assert Profile.load(tmp_path / FILE).tensor == 2


def test_the_word_is_no_file_and_needs_what_it_is_for(words: list[str]) -> None:
    assert parse([*words, *MEASURED, "--train-iters", "4"], world_size=2).flexpipe.measures
    with pytest.raises(ArgumentsError):
        parse([*words, "--flexpipe-profile", "measured", "--train-iters", "4"], world_size=2)
