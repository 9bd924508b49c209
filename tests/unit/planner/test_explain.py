"""What a decision says, and the planner's command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_flex.planner.decision import Decision, Reason
from megatron_flex.planner.explain import contents, explain, reason_text
from megatron_flex.planner.plan import Plan
from tests.unit.planner.instances_real import drawn_batch, even_batch, small_model, small_planner
from tools.plan import main

LENGTHS = ["2560", "300", "120", "90", "800", "50"]


def test_a_decision_tells_its_plan_its_numbers_and_why() -> None:
    planner = small_planner(4, simulations=3)
    batch = drawn_batch(1)
    running = planner.running(planner.even_plans[0], batch)
    decision = planner.decide([batch], running)
    text = explain(decision, planner.units.layers)
    assert decision.action.symbol in text
    assert str(decision.plan) in text
    assert "runner-up" in text
    assert all(reason.text in text for reason in decision.reasons)
    assert {r.condition for r in decision.reasons} >= {"A", "B"}
    for stage in decision.plan.stages:
        assert f"{stage.start}-{stage.stop - 1}" in text


def test_memory_optimisation_is_told_in_bytes() -> None:
    planner = small_planner(2, memory=2.5e9)
    decision = planner.decide([even_batch(8, 4096)], None)
    assert decision.plan.o_plan
    text = explain(decision, planner.units.layers)
    assert "O_plan: r = " in text


def test_both_sides_of_a_condition_are_shown_with_their_unit() -> None:
    text = reason_text(Reason("A", "it fits", 3e9, 2e9, "bytes", False))
    assert text == "A      no  it fits (3.000 GB against 2.000 GB)"
    assert "0.5000 s against" in reason_text(Reason("B", "x", 0.5, 1.0, "seconds", False))


def test_contents_of_stages() -> None:
    layers = small_model(2).layers
    assert contents(layers, 0, 6) == "embedding + 2 layers + head"
    assert contents(layers, 1, 2) == "0.5 layers"
    assert contents(layers, 1, 3) == "1 layer"
    assert contents(layers, 5, 6) == "head"


def test_the_command_line_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    current = "0:18@0-7 | 18:34@8-15"
    assert main(["--model", "gpt-3.35b", "--lengths", *LENGTHS, "--current", current]) == 0
    text = capsys.readouterr().out
    assert "stage  units" in text
    assert "decided in" in text


@pytest.mark.parametrize("planner", ["lookahead", "hbsa", "greedy", "static"])
def test_a_batch_file_is_planned_batch_by_batch(
    planner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "batches.txt"
    path.write_text("# two batches\n2000 300 20\n\n500 40 60 700\n")
    arguments = ["--cluster", "a100x4", "--batch-file", str(path), "--planner", planner, "--json"]
    assert main([*arguments, "--simulations", "0", "--model", "bert-24"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["batch"] for line in lines] == [0, 1]
    for line in lines:
        decision = Decision.from_json(json.dumps(line))
        assert Plan.parse(str(decision.plan)) == decision.plan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "9", "--model", "gpt-5"], "no model 'gpt-5'"),
        (["--lengths", "9", "--cluster", "moon"], "no cluster 'moon'"),
        (["--lengths", "9", "--current", "0:9@0"], "covers 9 units"),
        (["--lengths", "60000", "--memory-budget-gb", "3"], "lacks"),
        (["--lengths", "9", "--time-model", "paper"], "belongs to the planner hbsa"),
        (["--lengths", "9", "--profile", "none.json"], "cannot read the profile"),
        (["--lengths", "9", "0"], "--lengths must be at least 1, not 0"),
        (["--mock-batches", "0"], "--mock-batches must be at least 1"),
        (["--mock-batches", "1", "--global-batch-size", "0"], "--global-batch-size must be at"),
    ],
)
def test_what_cannot_be_is_one_clear_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("planner", ["lookahead", "hbsa", "static"])
@pytest.mark.parametrize("budget", [[], ["--memory-budget-gb", "2"]])
def test_the_smallest_budget_that_would_do_is_named_and_does(
    planner: str, budget: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    size = "3000" if budget else "400000"
    common = ["--planner", planner, "--cluster", "a100x2", "--model", "bert-24", "--lengths", size]
    assert main([*common, *budget]) == 1
    text = capsys.readouterr().err
    found = re.search(r"would do is (\S+) GB \(--memory-budget-gb (\S+)\)(.*)", text)
    assert found, text
    assert found[1] == found[2]
    assert ("with the reserve" in found[3]) == (not budget)
    assert main([*common, "--memory-budget-gb", found[2]]) == 0
    assert main([*common, "--memory-budget-gb", str(0.985 * float(found[2]))]) == 1


def test_ablations_are_flags(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--mock-batches", "2", "--simulations", "0", "--json", "--model", "bert-24",
            "--cluster", "a100x4"]  # fmt: skip
    for extra in (
        ["--no-lookahead"],
        ["--no-memory-optimisation"],
        ["--planner", "hbsa", "--no-bounds"],
        ["--planner", "hbsa", "--time-model", "paper"],
        ["--unit", "layer", "--schedule", "zb", "--shard-optimizer"],
    ):
        assert main([*base, *extra]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10
