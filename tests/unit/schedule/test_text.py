"""A program's text form is read back exactly, and says what is wrong with a broken one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.instructions import NAMES, ReduceGradient, SendActivation
from megatron_flex.schedule.text import dumps, excerpt, load, loads, save, short
from tests.unit.schedule.building import build
from tests.unit.schedule.strategies import Case, cases

PROGRAM = build(
    Plan.parse("0:4@0,1 | 4:8@2"), LayerList(3, True), OpCosts.uniform(2, 2), (7, 9), world_size=4
).program


@given(cases(devices=8, batches=12))
def test_any_program_round_trips(case: Case) -> None:
    built = case.build().program
    assert loads(dumps(built)) == built


def test_a_saved_program_is_read_back_and_leaves_nothing_else(tmp_path: Path) -> None:
    save(PROGRAM, tmp_path / "iteration.txt")
    assert load(tmp_path / "iteration.txt") == PROGRAM
    assert [p.name for p in tmp_path.iterdir()] == ["iteration.txt"]


def test_the_text_is_readable() -> None:
    lines = dumps(PROGRAM).splitlines()
    assert lines[:5] == [
        "megatron-flex program 1", "plan 0:4@0,1 | 4:8@2", "tokens 7 9", "route 0 1", "route 2 2"
    ]  # fmt: skip
    assert lines[5:8] == [
        "device 0",
        "  Forward micro_batch=0 stage=0",
        "  SendActivation micro_batch=0 stage=0 peer=2 tokens=7",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("megatron-flex program 1", "megatron-flex program 9", "line 1 must be"),
        ("plan 0:4", "plan 1:4", "line 2.*must start at unit 0"),
        ("tokens 7 9", "tokens 7 nine", "line 3"),
        ("device 1", "device 2", "expected device 1"),
        ("  Forward micro_batch=0", "  Forwards micro_batch=0", "line 7.*unknown instruction"),
        ("Forward micro_batch=0 stage=0", "Forward micro_batch=0", "line 7.*takes"),
        ("device 0\n", "", "before the first device"),
        ("plan 0:4@0,1 | 4:8@2\n", "", "no line 'plan"),
    ],
)
def test_a_broken_text_is_refused_with_its_line(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loads(dumps(PROGRAM).replace(old, new, 1))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "program.txt"
    path.write_text("something else\n")
    with pytest.raises(ValueError, match=r"program\.txt: not a program"):
        load(path)


def test_an_excerpt_brackets_the_step_and_shows_both_sides() -> None:
    text = excerpt(PROGRAM, [1, 0, 2, 0], [0, 2], around=1)
    assert text.splitlines() == [
        "  device 0  step 0:  F0.0  [sendA0.0>2]  recvG0.1<2",
        "  device 2  step 1:  F0.1  [B0.1]        sendG0.1>0",
    ]


def test_every_kind_of_instruction_has_a_short_name() -> None:
    assert short(SendActivation(3, 1, 2, 50)) == "sendA3.1>2"
    assert short(ReduceGradient(4, (0, 1))) == "reduce(4)"
    names = {short(cls(*range(len(cls.__dataclass_fields__)))) for cls in NAMES.values()}
    assert len(names) == len(NAMES)
