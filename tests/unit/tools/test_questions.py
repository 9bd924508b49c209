"""Tools that take the flags of a training command, or a checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_flex.arguments import parse
from megatron_flex.checkpoint.save import save
from megatron_flex.cluster.profile import Profile
from megatron_flex.loop.questions import read_run
from tests.end_to_end import runs
from tools import plan, profile_layers, report_memory


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prefix = runs.write_documents(tmp_path_factory.mktemp("data") / "documents", longest=100)
    more = ["--data-path", prefix, "--split", "1,0,0", "--train-iters", "10", "--save", "never"]
    return [*runs.MODEL, *runs.TRAINING, *more, "--pipeline-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def checkpoint(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A checkpoint's arguments are all that is looked at."""
    directory = tmp_path_factory.mktemp("checkpoint")
    arguments = parse(flags, world_size=2).values()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        save(directory, 1, {"w": torch.zeros(3)}, {"arguments": arguments}, group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    return ["--load", str(directory), "--use-checkpoint-args"]


def test_plan_answers_for_a_runs_own_batches(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([*flags, "--workers", "4", "--batches", "2"]) == 0
    text = capsys.readouterr().out
    assert "model: GPT with " in text
    assert "are longer than --seq-length 64 and lose their ends" in text
    assert text.count("predicted: ") == 2
    assert "on the plan of the flags" in text
    assert text.rstrip().endswith(": 0:4@0,1 | 4:8@2,3")


def test_where_nobody_says_for_how_many_workers_the_answer_does(flags: list[str]) -> None:
    for words, said in ((flags, True), ([*flags, "--workers", "4"], False)):
        _, run = read_run(plan.parser, words)
        assert run is not None
        assert (
            any("workers: 2, those of the flags' pipeline" in line for line in run.lines()) is said
        )


def test_plan_names_the_smallest_budget_of_a_run_which_is_accepted(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--flexpipe-memory-budget-gb"
    words = [*flags, "--workers", "4", "--batches", "1", "--flexpipe", flag]
    assert plan.main([*words, "1e-4"]) == 1
    text = capsys.readouterr().err
    found = re.search(rf"the smallest budget that would do is \S+ MB \({flag} (\S+)\)", text)
    assert found is not None, text
    assert plan.main([*words, found[1]]) == 0
    assert plan.main([*words, f"{0.98 * float(found[1]):.12g}"]) == 1


def test_a_checkpoint_answers_as_the_flags_that_it_was_written_with(
    flags: list[str], checkpoint: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for words in (flags, [*checkpoint, "--pipeline-model-parallel-size", "2"]):
        assert report_memory.main([*words, "--workers", "4", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert len(answers[0]["devices"]) == 4
    # The first hundred batches have the longest sample, 64 tokens, in one of them.
    assert max(answers[0]["micro_batches"]) == 64


def test_a_profile_is_of_a_runs_layers(flags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    larger = ["--hidden-size", "128", "--ffn-hidden-size", "512", "--tokens", "64", "256", "1024"]
    own = [*larger, "--repeats", "1", "--held-out", "4", "--no-links", "--output", str(path)]
    assert profile_layers.main([*flags, *own]) == 0
    profile = Profile.load(path)
    assert profile.tokens == (64, 1024)
    assert profile.name == "this run on CPU core"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "0"], "--workers must be at least 1"),
        (["--workers", "3"], "3 workers are no multiple of --pipeline-model-parallel-size 2"),
        (["--hidden-sizes", "3"], "did you mean --hidden-size?"),
        (["--data-path", "nowhere"], "nowhere"),
    ],
)
def test_what_is_wrong_is_said(
    flags: list[str], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert report_memory.main([*flags, *words]) == 1
    except SystemExit as error:
        print(error)
    captured = capsys.readouterr()
    assert message in captured.out + captured.err


def test_a_checkpoint_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--use-checkpoint-args"):
        plan.main(["--load", str(tmp_path), "--use-checkpoint-args"])
