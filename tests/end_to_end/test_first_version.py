"""Checkpoints, files of plans and records of the first version: they load, and runs go on alike.

``tests/data/first_version/make.py`` made the files, at the first version's commit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_flex.config.config import Architecture
from tests.close import assert_numbers_close
from tests.data.first_version import make
from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs

FILES = Path(make.__file__).parent
PLANS = ["--flexpipe-plans", str(FILES / "plans.txt")]
RECORD = ["--flexpipe-plans", str(FILES / "record.jsonl")]


def losses(name: str) -> list[tuple[float, ...]]:
    """What the first version's run of six iterations had."""
    return [tuple(values) for values in json.loads((FILES / name / "losses.json").read_text())]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("gpt", PLANS),
        ("gpt", ["--flexpipe"]),
        ("bert", RECORD),
        ("bert", ["--flexpipe-plan", "0:2@1 | 2:4@0"]),
    ],
)
def test_a_run_of_the_first_version_goes_on(
    workers: WorkerPool, tmp_path: Path, name: Architecture, how: list[str]
) -> None:
    words = [*make.flags(tmp_path, name), *how, "--load", str(FILES / name)]
    found = runs.run(workers, 2, words, name)
    assert found.progress["iteration"] == make.LAST
    assert_numbers_close(found.losses, losses(name)[make.SAVED :], 1e-6, "losses")


def test_plans_of_the_first_version_give_its_losses(workers: WorkerPool, tmp_path: Path) -> None:
    found = runs.run(workers, 2, [*make.flags(tmp_path, "gpt"), *PLANS])
    assert_numbers_close(found.losses, losses("gpt"), 1e-6, "losses")
