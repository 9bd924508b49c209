from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flex.loop.plans import Choice, ScriptedPlans, read_plans
from megatron_flex.loop.recording import Recording
from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.telemetry.sink import TelemetryError

LAYERS = LayerList(3, tied=True)  # 8 units, 9 slabs
ONE, TWO = Plan.parse("0:8@0"), Plan.parse("0:3@0 | 3:8@1")


def write(directory: Path, text: str) -> str:
    path = directory / "plans.txt"
    path.write_text(text)
    return str(path)


def test_a_script_has_a_plan_a_line_and_comments(tmp_path: Path) -> None:
    path = write(tmp_path, f"# all on one\n{ONE}\n\n{TWO}  # iteration 2; action 3\n")
    assert [c.plan for c in read_plans(path, LAYERS, 2)] == [ONE, TWO]


def test_the_last_plan_of_a_script_stays() -> None:
    plans = ScriptedPlans([Choice(ONE), Choice(TWO)])
    assert [plans.at(i).plan for i in range(4)] == [ONE, TWO, TWO, TWO]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:8@0\n0:7@0\n", "line 2: the plan '0:7@0' covers 7 units, the model has 8"),
        ("0:8@5\n", "line 1: .* names device 5, but there are 2"),
        ("0:8@0 ~ 3@1,x\n", "line 1: '3@1,x': expected SLAB@WORKER"),
        ("0:8@0\n0:4@0 | 4:8@1 ~ 99@1\n", r"line 2: '99@1' names slab 99, .* has 9 \(0 to 8\)"),
        ("0:4@0 | 4:8@1 ~ 4@1,9@1\n", "line 1: '9@1' names slab 9, but the model has 9"),
        ("0:4@0 | 4:8@1 ~ 4@1, 3@9\n", r"line 1: '3@9' names worker 9, .* are 2 \(0 to 1\)"),
        ("0:4@0 | 4:8@1 ~ 3@1\n", "line 1: '3@1' hands slab 3 to worker 1, which does not hold it"),
        ("nonsense\n", "line 1: stage 0 of the plan is 'nonsense'"),
        ("# nothing\n", "has no plans"),
    ],
)
def test_a_bad_script_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_plans(write(tmp_path, text), LAYERS, 2)


def test_a_missing_script_is_named() -> None:
    with pytest.raises(PlanError, match=r"--flexpipe-plans nowhere\.txt cannot be read"):
        read_plans("nowhere.txt", LAYERS, 2)


def test_a_recording_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.txt"
    recording = Recording(str(path), 0)
    recording.add(0, Choice(ONE, "①", "A: it\nfits"))
    recording.add(1, Choice(TWO))
    assert [c.plan for c in read_plans(str(path), LAYERS, 2)] == [ONE, TWO]
    assert path.read_text().splitlines()[0] == "0:8@0  # iteration 1; action ①; A: it fits"


def test_a_recording_that_begins_late_has_its_plans_in_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "record.txt"
    recording = Recording(str(path), 2)
    recording.add(2, Choice(TWO, "①"))
    recording.add(3, Choice(ONE))
    plans = ScriptedPlans(read_plans(str(path), LAYERS, 2))
    assert [plans.at(i).plan for i in range(4)] == [TWO, TWO, TWO, ONE]
    assert path.read_text().splitlines()[1] == f"{TWO}  # iteration 2; not recorded"


def test_a_recording_says_what_is_handed_over_after_the_update(tmp_path: Path) -> None:
    path = tmp_path / "record.txt"
    late = frozenset({(3, 1), (8, 0)})
    Recording(str(path), 0).add(0, Choice(TWO, "③", "it is longer", late=late))
    (choice,) = read_plans(str(path), LAYERS, 2)
    assert (choice.plan, choice.late) == (TWO, late)


def test_a_resumed_recording_replaces_what_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "record.txt"
    first = Recording(str(path), 0)
    for iteration in range(3):
        first.add(iteration, Choice(ONE))
    resumed = Recording(str(path), 1)
    resumed.add(1, Choice(TWO))
    assert [c.plan for c in read_plans(str(path), LAYERS, 2)] == [ONE, TWO]


@pytest.mark.parametrize(
    "content", [b"0:8@0  # mine\n", b"0:8@0", b"0:8@0  # iteration 2\n", b"a note\n", b"{}\n"]
)
def test_a_file_that_no_run_recorded_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plans.txt"
    path.write_bytes(content)
    with pytest.raises(TelemetryError, match=r"--flexpipe-record .*exists and is not a record"):
        Recording(str(path), 0)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("plans.txt", content)]


def test_a_recording_that_starts_anew_keeps_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "plans.txt"
    for plan in (ONE, TWO):
        recording = Recording(str(path), 0)
        recording.add(0, Choice(plan))
        recording.close()
    assert recording.notice == f"--flexpipe-record: the record of an earlier run is now {path}.1"
    found = [read_plans(str(p), LAYERS, 2)[0].plan for p in (tmp_path / "plans.txt.1", path)]
    assert found == [ONE, TWO]


def test_a_torn_line_of_a_recording_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "plans.txt"
    recording = Recording(str(path), 0)
    recording.add(0, Choice(ONE))
    recording.add(1, Choice(ONE))
    path.write_bytes(path.read_bytes() + b"0:4@0 |")
    Recording(str(path), 2).add(2, Choice(TWO))
    assert [c.plan for c in read_plans(str(path), LAYERS, 2)] == [ONE, ONE, TWO]
