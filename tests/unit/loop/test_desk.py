"""The first worker's desk: programs from the planner's process, or made in its place."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_flex.loop.desk import Desk
from megatron_flex.planner.messages import Question, Task
from megatron_flex.planner.plan import PlanError
from tests.unit.planner.test_service import LONG, SETUP, SHORT

PLAN = "0:5@0,1 | 5:10@2,3"
TASK = Task("train 3", PLAN, SHORT)


@pytest.fixture
def desk() -> Iterator[Desk]:
    found = Desk(SETUP)
    yield found
    found.close()


def test_what_is_made_in_its_place_is_what_the_process_makes(desk: Desk) -> None:
    package = desk.package(TASK)
    assert not desk.missed
    own = desk.deputy.done(TASK).package
    assert own is not None
    assert package == own
    assert len(package.parts) == 4


def test_what_is_expected_is_made_ahead(desk: Desk) -> None:
    desk.package(TASK)
    later = [Task(f"train {i}", PLAN, LONG) for i in (4, 5)]
    for task in later:
        desk.expect(task)
    for task in later:
        assert desk.package(task, patient=True).name == task.name
    assert not desk.missed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_gone_or_stopped_is_done_without(
    desk: Desk, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    desk.package(TASK)
    assert desk.pid is not None
    os.kill(desk.pid, number)
    for name in ("train 4", "train 5", "train 6", "train 7"):
        task = Task(name, PLAN, LONG)
        desk.expect(task)
        assert desk.package(task).name == name
    assert desk.missed
    assert "the first worker goes on without it" in capfd.readouterr().err


def test_a_first_answer_does_where_the_whole_one_is_late(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = desk.deputy.answer(Question(0, (SHORT,)))
    first = replace(whole, iteration=1, first=True)
    replies = [replace(whole, iteration=0), first, None]
    process = desk._process
    assert process is not None
    monkeypatch.setattr(process, "take", lambda timeout: replies.pop(0))
    assert desk.answer(1) == first
    assert desk.missed == 1
    replies += [first, replace(whole, iteration=1)]
    assert desk.answer(1) == replace(whole, iteration=1)
    assert desk.missed == 1


def test_replies_that_nobody_waits_for_do_not_stop_it(desk: Desk) -> None:
    desk.package(TASK)
    for number in range(8):  # more than may be unanswered; only the last is wanted
        desk.expect(Task(f"evaluate {number}", PLAN, SHORT, forward_only=True))
    wanted = Task("evaluate 100", PLAN, SHORT, forward_only=True)
    for _ in range(100):
        desk.expect(wanted)
        if desk.package(wanted, patient=True).name == wanted.name and not desk.missed:
            break
    assert not desk.missed


def test_a_program_that_cannot_be_made_is_an_error_in_words(desk: Desk) -> None:
    with pytest.raises(PlanError, match=r"no program for 'train 1': .* covers 9 units"):
        desk.package(Task("train 1", "0:9@0", SHORT))
