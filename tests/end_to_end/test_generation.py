"""``--eval-generate``: completions on any plan are those of the tool in one process."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megatron_flex.telemetry.record import CompletionRecord
from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs
from tools import generate

PROMPTS = ("5 6 7 8", "1", "40 2 40 2 17 9 9 30 31", "88 3", "7 7 7")
PLANS = {
    1: "0:8@0",
    2: "0:3@0 | 3:4@1 | 4:7@1 | 7:8@0; schedule zb-v",
    3: "0:4@0,1 | 4:8@2; shard 1-3",
}


# Two devices of two workers each, which divide layers, and with the second flag tokens too.
SHARED = [["--tensor-model-parallel-size", "2"],
          ["--tensor-model-parallel-size", "2", "--sequence-parallel"]]  # fmt: skip


def train(
    workers: WorkerPool, size: int, directory: Path, *words: str
) -> tuple[list[CompletionRecord], tuple[str, ...]]:
    """What was completed, and what was said."""
    data = runs.write_documents(directory / "data")
    asked = directory / "asked.jsonl"
    lines = [json.dumps({"text": text}) for text in PROMPTS[:-1]]
    asked.write_text("\n".join([*lines, "", PROMPTS[-1]]) + "\n")
    argv = [*runs.MODEL, *runs.TRAINING, "--train-data-path", data, "--valid-data-path", data,
            "--eval-generate", str(asked), "--eval-generate-tokens", "7", *words]  # fmt: skip
    argv += shlex.split("--train-iters 4 --eval-interval 2 --eval-iters 1")
    run = runs.run(workers, size, argv)
    return run.history.completed, run.printed


@pytest.mark.parametrize("size", sorted(PLANS))
def test_completions_at_validation_are_those_of_the_checkpoint(
    workers: WorkerPool, tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "checkpoints")
    found, _ = train(workers, size, tmp_path, "--flexpipe-plan", PLANS[size], "--save", saved)
    assert [r.iteration for r in found] == [2] * 5 + [4] * 5
    assert [r.prompt for r in found[:5]] == list(PROMPTS)
    out = tmp_path / "out.jsonl"
    words = ["--load", saved, "--prompts", *PROMPTS,
             "--num-tokens-to-generate", "7", "--output-path", str(out)]  # fmt: skip
    assert generate.main(words) == 0, capsys.readouterr().err
    there = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r.completion for r in found[5:]] == [r["completion"] for r in there]
    assert [(r.tokens, r.ended) for r in found[5:]] == [
        (len(r["tokens"]), r["ended"]) for r in there
    ]


@pytest.mark.parametrize("more", SHARED, ids=["layers", "tokens"])
def test_workers_that_share_layers_complete_together(
    workers: WorkerPool, tmp_path: Path, more: list[str]
) -> None:
    found, _ = train(workers, 4, tmp_path / "shared", "--flexpipe-plan", PLANS[2], *more)
    alone, _ = train(workers, 1, tmp_path / "one", "--flexpipe-plan", PLANS[1])
    assert found == alone


def test_completions_go_on_where_plans_change(
    workers: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = tmp_path / "plans.txt"
    plans.write_text("0:3@0 | 3:8@1\n0:5@1 | 5:8@0,1\n0:8@0,1\n0:4@0 | 4:8@1\n")
    found, _ = train(workers, 2, tmp_path / "other", "--flexpipe-plans", str(plans))
    alone, _ = train(workers, 1, tmp_path / "one", "--flexpipe-plan", PLANS[1])
    assert found == alone
