"""tools/whatif.py: what it says, and that the trainer does with its flags what was simulated."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from megatron_flex.arguments import parse, plan_of
from megatron_flex.cluster.cluster import load
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.loop.assemble import assemble
from megatron_flex.loop.cutting import run_cut
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.dynapipe import dynapipe_of
from megatron_flex.planner.flops import cost_coefficients
from megatron_flex.planner.plan import OPlan
from megatron_flex.planner.static import static_plan
from megatron_flex.simulator.batching import ByCut
from megatron_flex.simulator.flags import static_flags
from megatron_flex.simulator.presets import STATIC
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.static import tune
from tests.end_to_end import runs
from tests.unit.planner.instances_real import small_model
from tools import simulate, whatif

NAMES = ("megatron-pad", "megatron-pad-all", "zero-bubble-pad", "packed-1f1b", "packed-zero-bubble",
         "bucket", "dynapipe", "seq1f1b", "static-slices")  # fmt: skip
LENGTHS = [(9, 30, 60, 12, 5, 40, 33, 21), (3, 8, 61, 50, 4, 17, 9, 30)]
TRAINING = shlex.split("--mock-data --global-batch-size 8 --train-iters 4 --lr 1e-3"
                       " --flexpipe-cluster cpux4")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "again"), [*((name, ()) for name in NAMES), ("packed-1f1b", (1, 2))]
)
def test_the_trainer_does_with_the_flags_what_was_simulated(
    name: str, again: tuple[int, ...]
) -> None:
    plain = parse([*runs.MODEL, *TRAINING, "--micro-batch-tokens", "64"], world_size=4)
    model, cluster = assemble(plain).model, load("cpux4")
    setting = Setting(model, cluster, closed_form_profile(model, cluster))
    tuned = tune(STATIC[name].runners(setting, LENGTHS), LENGTHS, LENGTHS)
    if again:  # in an even layout, which numbers alone would give
        tuned = replace(tuned, plan=static_plan(model, 2, 4), settled=OPlan(recompute=again))
    words = static_flags(setting, tuned)
    if name == "megatron-pad-all":
        words += ["--seq-length", "61"]
    config = parse([*runs.MODEL, *TRAINING, *words], world_size=4)
    assert config.schedule == tuned.runner.variant.schedule
    plan = plan_of(config, model)
    assert plan.stages == tuned.plan.stages
    assert plan.o_plan == (tuned.settled or tuned.plan.o_plan)
    cut = run_cut(config, cost_coefficients(model), model, None)
    rule = tuned.runner.variant.batching
    if isinstance(rule, ByCut):
        expected = rule.cut
    else:
        assert cut.dynapipe == dynapipe_of(tuned.runner.costs, tuned.plan)
        expected = cut
    for lengths in LENGTHS:
        batch = GlobalBatch(0, np.array(lengths), (sum(lengths),))
        for target in (0, 1, 2, 3):
            assert cut.micro_batches(batch, target) == expected.micro_batches(batch, target)


SMALL = shlex.split("--cluster cpux2 --iterations 2 --tuning-batches 1 --simulations 2"
                    " --global-batch-size 4 --seq-length 256")  # fmt: skip
CHOSEN = ["flexpipe", "static-slices", "packed-1f1b", "megatron-pad", "no-slices"]


def model_file(directory: Path) -> str:
    """A small model, as a file."""
    path = directory / "model.json"
    path.write_text(json.dumps(asdict(small_model(2, hidden_size=128, ffn_hidden_size=256,
                                                  num_attention_heads=2, num_query_groups=2,
                                                  vocab_size=500, padded_vocab_size=512,
                                                  params_dtype="float32"))))  # fmt: skip
    return str(path)


def test_it_says_what_is_best_and_what_each_part_gains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--model", model_file(tmp_path), "--output", str(tmp_path / "out")]
    chosen = [*CHOSEN, "tensor-parallel"]
    assert whatif.main([*words, "--configurations", *chosen]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert {line.split()[0] for line in lines[1:8]} == {*chosen, "flexpipe-tp2"}
    rates = [float(line.split()[3].replace(",", "")) for line in lines[1:8]]
    assert rates == sorted(rates, reverse=True)
    assert any(line.startswith("fastest: ") for line in lines)
    assert "slices of long samples" in text
    assert "with layers that 2 devices of a server share it is" in text
    command = next(line for line in lines if line.startswith("torchrun "))
    assert "--flexpipe" in command
    assert "--flexpipe-cluster cpux2" in command
    assert (tmp_path / "out" / "report.html").stat().st_size < 5e6
    assert whatif.main([*words, "--configurations", *chosen]) == 0  # nothing is left to do
    again = capsys.readouterr().out
    assert again.splitlines()[:-1] == lines[:-1]  # but for the seconds
    assert whatif.main([*words, "--seed", "5", "--configurations", *chosen]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"whatif: --output {tmp_path}/out has the answer to another question")
    assert said.count("\n") == 1


def test_a_training_command_is_answered_by_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = runs.write_documents(tmp_path / "documents", longest=100)
    own = shlex.split(f"--data-path {data} --split 1,0,0 --train-iters 10 --seed 77")
    words = shlex.split(f"--workers 2 --iterations 2 --tuning-batches 1 --simulations 2"
                        f" --output {tmp_path}/out --no-page --configurations")  # fmt: skip
    assert whatif.main([*runs.MODEL, *runs.TRAINING, *own, *words, *CHOSEN]) == 0
    text = capsys.readouterr().out
    commands = [line for line in text.splitlines() if line.startswith("torchrun ")]
    assert commands
    for command in commands:
        found = shlex.split(command)
        assert found[:4] == ["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py"]
        config = parse(found[4:], world_size=2)
        assert config.training.seed == 77
        assert config.training.global_batch_size == 8
        plan_of(config, assemble(config).model)
    batches = (tmp_path / "out" / "batches.txt").read_text().splitlines()
    assert [len(line.split()) for line in batches] == [8, 8]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--configurations flexpipes", "no configuration is named flexpipes"),
        ("--memory-budget-gb nan", "--memory-budget-gb must be a finite number above 0, not nan"),
        ("--model nothing.json", "nothing.json is no model"),
        ("--batch-file nothing.txt", "nothing.txt cannot be read"),
    ],
)
def test_wrong_words_are_one_message(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert whatif.main(words.split()) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_batches_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "batches.txt"
    file.write_text("# two batches\n500 500\n\n100 300\n")
    words = ["--batch-file", str(file), "--output", str(tmp_path / "out"), "--iterations", "3"]
    small = "--cluster a100x4 --tuning-batches 1 --configurations megatron-pad".split()
    assert simulate.main([*small, *words]) == 0
    lines = (tmp_path / "out" / "megatron-pad.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)["tokens"] for line in lines] == [1000, 400, 1000]
    args = whatif.parser().parse_args([*small, *words])
    assert "pretrain_gpt.py --global-batch-size 2 " in whatif.command(args, None, [], [])
    args.model = "bert-24"
    assert " pretrain_bert.py " in whatif.command(args, None, [], [])
    file.write_text("500 0\n")
    assert simulate.main([*small, *words]) == 1
    assert "line 1: expected lengths of at least 1" in capsys.readouterr().err


def test_a_damaged_state_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--model", model_file(tmp_path), "--output", str(tmp_path / "out"),
             "--configurations", "flexpipe-untuned"]  # fmt: skip
    assert simulate.main(words) == 0
    state = tmp_path / "out" / "flexpipe-untuned.state.json"
    whole = json.loads(state.read_text())
    log = tmp_path / "out" / "flexpipe-untuned.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    state.write_text(json.dumps({**whole, "iteration": 1, "pool": [["no plan"]]}))
    capsys.readouterr()
    assert simulate.main(words) == 1
    assert f"{state} is damaged: remove it" in capsys.readouterr().err
    state.unlink()
    assert simulate.main(words) == 0
