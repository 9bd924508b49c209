"""The list of faults for ``make mutants`` stays true: cheap checks of what the runner needs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.faults import Fault, StaleList, load, problems
from tests.mutants.run import Done, Outcome, Verdict, judge, report

FAULT = Fault("f", "room", "a.py", "x = 1", "x = 2", "breaks x", ("tests/test_a.py",))


def test_every_fault_fits_the_source_and_names_tests_that_exist() -> None:
    assert problems(load()) == []


def test_the_list_covers_python_and_c_plus_plus_in_every_room() -> None:
    faults = load()
    assert len(faults) >= 150
    assert min(Counter(f.room for f in faults).values()) >= 10
    assert sum(f.native for f in faults) >= 30


def test_a_list_that_does_not_fit_is_told(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text("def test_x(): pass\n")
    (tmp_path / "a.py").write_text("x = 1\n")
    assert problems((FAULT,), tmp_path) == []
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    assert problems((FAULT,), tmp_path) == ["f: its old text occurs 2 times in a.py"]
    (tmp_path / "a.py").write_text("y = 1\n")
    assert problems((FAULT,), tmp_path) == ["f: its old text occurs 0 times in a.py"]
    (tmp_path / "a.py").unlink()
    assert "a.py" in problems((FAULT,), tmp_path)[0]


@pytest.mark.parametrize(
    ("tests", "missing"),
    [
        (("tests/test_a.py::test_x", "tests/test_a.py::test_x[1]"), None),
        (("tests/test_a.py::test_y",), "f: there is no test tests/test_a.py::test_y"),
        (("tests/test_b.py",), "f: there is no test tests/test_b.py"),
        ((), "f: names no test"),
    ],
)
def test_tests_that_do_not_exist_are_told(
    tmp_path: Path, tests: tuple[str, ...], missing: str | None
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text("def test_x(): pass\n")
    (tmp_path / "a.py").write_text("x = 1\n")
    fault = Fault("f", "room", "a.py", "x = 1", "x = 2", "breaks x", tests)
    assert problems((fault,), tmp_path) == ([] if missing is None else [missing])


@pytest.mark.parametrize(
    "text",
    [
        "- {file: a, tests: [t], fault: []}",
        "- {file: a, tests: [t], faults: [{id: b, old: c, new: d, breaks: e, why: f}]}",
        "- {file: a, tests: [t], faults: [{id: b, old: c, new: d, breaks: e},"
        " {id: b, old: c, new: d, breaks: e}]}",
    ],
)
def test_a_list_with_a_mistake_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "room.yaml").write_text(text)
    with pytest.raises(StaleList):
        load(tmp_path)


@pytest.mark.parametrize(
    ("status", "output", "verdict"),
    [
        (0, "3 passed", Verdict.SURVIVED),
        (1, "FAILED tests/test_a.py::test_x - assert", Verdict.NOTICED),
        (1, "ERROR tests/test_a.py::test_x - a fixture", Verdict.NOTICED),
        (-11, "", Verdict.NOTICED),
        (None, "", Verdict.TIMED_OUT),
        (1, "the runner itself", Verdict.BROKEN),
        (1, "ERROR tests/test_a.py", Verdict.BROKEN),
        (2, "ERROR tests/test_a.py - a file that cannot be imported", Verdict.BROKEN),
        (5, "no tests ran", Verdict.BROKEN),
    ],
)
def test_only_a_failed_test_a_crash_or_a_time_out_notices(
    status: int | None, output: str, verdict: Verdict
) -> None:
    assert judge(Done(status, output, 1.0))[0] is verdict


def test_the_report_counts_by_room_and_gives_reasons() -> None:
    other = Fault("g", "hall", "a.py", "x = 1", "x = 3", "breaks it", (), harmless="nobody reads x")
    text = report(
        [Outcome(FAULT, Verdict.SURVIVED, 1.0), Outcome(other, Verdict.SURVIVED, 1.0),
         Outcome(FAULT, Verdict.TIMED_OUT, 9.0, "nothing within 9 s")]
    ).splitlines()  # fmt: skip
    assert [line.split() for line in text[1:4]] == [
        ["hall", "1", "0", "1", "1"],
        ["room", "2", "1", "1", "0"],
        ["all", "3", "1", "2", "1"],
    ]
    assert text[4:] == [
        "survived: g (a.py; breaks it): harmless: nobody reads x",
        "survived: f (a.py; breaks x): no test notices it",
        "noticed by a time-out: f (a.py): nothing within 9 s",
    ]
