"""What the figures of a page must be, given a run's records."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.report.figures import (
    PARTS,
    columns,
    conditions,
    grouped,
    number,
    summary,
    switches,
    time_parts,
    worker_memory,
)
from megatron_flex.report.read import PlanLine, RunData
from tests.unit.report.records import LAYOUTS, ONE, TWO, iteration, run_object


def test_the_parts_of_an_iteration_are_those_of_its_clocks() -> None:
    parts = time_parts(iteration(1), iteration(2, **{"seconds-update": 0.25}))
    assert parts == pytest.approx(
        {
            "compute": 5.0,
            "waiting": 1.25,
            "norm": 0.75,
            "reduce": 0.5,
            "state": 0.25,
            "update": 0.25,  # the next record has it
            "program": 0.5,
            "other": 0.25 + (10.0 - 8.0 - 0.25 - 0.5),
        }
    )


def test_updates_of_an_iteration_that_has_no_follower_are_not_invented() -> None:
    for following in (None, iteration(3)):
        parts = time_parts(iteration(1), following)
        assert "update" not in parts
        assert sum(parts.values()) == pytest.approx(10.0)


def test_a_stall_is_taken_from_the_time_before_the_first_instruction_then_from_state() -> None:
    short = time_parts(iteration(1, **{"switch-stall": 0.75}), None)
    assert (short["stall"], short["state"]) == pytest.approx((0.75, 0.25))
    assert "program" not in short  # the wait for the program is a part of that stall
    long = time_parts(iteration(1, **{"switch-stall": 2.125}), None)
    assert (long["stall"], long["state"]) == pytest.approx((2.125, 0.125))
    assert sum(long.values()) == pytest.approx(10.0)


def test_a_simulation_tells_bubble_from_messages() -> None:
    record = iteration(
        1, **{"seconds-bubble": 1.5, "seconds-message": 0.5, "seconds-receive": None,
              "seconds-send": None, "seconds-norm": None, "seconds-host": 0.125}
    )  # fmt: skip
    parts = time_parts(record, iteration(2, **{"seconds-update": 9.0}))
    assert (parts["bubble"], parts["message"]) == (1.5, 0.5)
    assert (parts["update"], parts["host"]) == (0.5, 0.125)  # its own
    assert "waiting" not in parts


def test_where_nothing_was_timed_there_are_no_parts() -> None:
    assert time_parts(iteration(1, **{"seconds-compute": None}), None) == {}
    assert time_parts(iteration(1, **{"seconds-to-norm": None}), None) == {}


SECONDS = st.floats(0.0, 100.0) | st.none()


@given(
    st.fixed_dictionaries(
        {"elapsed": st.floats(0.0, 100.0), "switch-stall": SECONDS}
        | {f"seconds-{name}": SECONDS for name in
           ("to-norm", "compute", "receive", "send", "reduce", "state", "norm", "program", "bubble",
            "message")}
    ),
    SECONDS,
)  # fmt: skip
def test_parts_are_never_negative_and_add_up(record: dict[str, Any], update: float | None) -> None:
    following = {"iteration": 2, "seconds-update": update}
    parts = time_parts({"iteration": 1, **record}, following)
    assert set(parts) <= set(PARTS)
    assert all(seconds > 0.0 for seconds in parts.values())
    if parts:
        assert sum(parts.values()) == pytest.approx(record["elapsed"], abs=1e-9)


def test_columns_have_an_entry_for_each_iteration() -> None:
    records = [iteration(k, plan=plan) for k, plan in enumerate(LAYOUTS, 1)]
    records[2]["action"] = "④ fewer stages"
    found = columns(RunData("run", records))
    assert found.first == [1, 2, 3, 4, 5]
    assert found.values["tokens_per_second"] == [10.0] * 5
    assert found.values["balanced"] == [25.0] * 5
    assert found.values["length50"] == [20.0] * 5
    assert found.values["lm loss"] == [8.0, 7.0, 6.0, 5.0, 4.0]
    assert [found.plans[i] for i in found.plan] == list(LAYOUTS)
    assert found.action == [-1, -1, 0, -1, -1]
    assert found.actions == ["④ fewer stages"]
    assert "predicted" not in found.values  # no iteration has it


def test_what_is_not_finite_is_a_gap() -> None:
    found = columns(RunData("run", [iteration(1), iteration(2, **{"lm loss": "NaN"})]))
    assert found.values["lm loss"] == [8.0, None]


def test_plans_of_an_old_log_come_from_the_record_of_plans() -> None:
    records = [iteration(1, plan=None), iteration(2, plan=None)]
    found = columns(RunData("run", records, plans={2: PlanLine(ONE)}))
    assert found.plan == [-1, 0]
    assert found.plans == [ONE]


@given(st.lists(st.floats(-1e6, 1e6) | st.none(), max_size=40), st.integers(1, 7))
def test_groups_keep_means_extremes_and_sums(values: list[float | None], group: int) -> None:
    means, most, sums = (grouped(n, values, group) for n in ("elapsed", "memory", "stall"))
    for i in range(0, len(values), group):
        known = [v for v in values[i : i + group] if v is not None]
        if not known:
            assert means[i // group] is most[i // group] is sums[i // group] is None
            continue
        assert means[i // group] == pytest.approx(math.fsum(known) / len(known), abs=1e-6)
        assert most[i // group] == max(known)
        if group > 1:
            assert sums[i // group] == pytest.approx(math.fsum(known), abs=1e-6)
    assert len(means) == -(-len(values) // group)


def test_a_long_run_has_at_most_so_many_points() -> None:
    records = [iteration(k, elapsed=float(k)) for k in range(1, 24)]
    found = columns(RunData("run", records), longest=10)
    assert found.group == 3
    assert found.first == list(range(1, 24, 3))
    assert found.values["elapsed"][0] == 2.0
    assert found.values["elapsed"][-1] == 22.5
    assert (found.values["lm loss_least"][0], found.values["lm loss_most"][0]) == (6.0, 8.0)
    assert found.values["tokens_per_second_most"][-1] == pytest.approx(100.0 / 22.0)
    assert "lm loss_least" not in columns(RunData("run", records)).values


def test_switches_are_changes_of_the_layout_alone() -> None:
    plans = (TWO, f"{TWO} ; lean", ONE, ONE, TWO)
    records = [iteration(k, plan=plan) for k, plan in enumerate(plans, 1)]
    records[2] |= {"action": "④ fewer stages", "reason": "A: x; B: y", "switch-stall": 0.5}
    run = RunData("run", records, plans={5: PlanLine(TWO, (), "D: of the record")})
    first, second = switches(run)
    assert (first.iteration, first.before, first.after) == (3, plans[1], ONE)
    assert (first.action, first.stall) == ("④ fewer stages", 0.5)
    assert conditions(first.reason) == ["A: x", "B: y"]
    assert (second.iteration, second.reason, second.stall) == (5, "D: of the record", None)


def test_memory_by_worker_is_the_most_of_each_group() -> None:
    rows = [[1, 5], [4, 2], [3, 0], [2, 9], [1, 1]]
    records = [iteration(k, **{"memory-by-worker": row}) for k, row in enumerate(rows, 1)]
    assert worker_memory(records) == ([0, 1, 2, 3, 4], [[1, 5], [4, 2], [3, None], [2, 9], [1, 1]])
    assert worker_memory(records, cells=4) == ([0, 3], [[4, 5], [2, 9]])
    assert worker_memory([iteration(1, **{"memory-by-worker": None})]) == ([], [])


def test_the_summary_adds_up() -> None:
    records = [iteration(k, plan=plan) for k, plan in enumerate(LAYOUTS, 1)]
    records[1] |= {"predicted": 5.0, "predicted-uncorrected": 4.0, "predicted-without-slices": 6.0,
                   "sliced-samples": 1.0, "slices": 3.0}  # fmt: skip
    records[2] |= {"predicted": 20.0, "predicted-uncorrected": 8.0, "switch-stall": 0.5}
    found = summary(RunData("run", records, runs=[run_object()], about=[0] * 5))
    assert found["iterations"] == 5
    assert found["seconds"] == 50.0
    assert found["tokens_per_second"] == 10.0
    assert (found["loss_first"], found["loss_last"]) == (7.5, 4.5)
    assert found["of_balance"] == pytest.approx(0.4)
    assert found["bubble"] == pytest.approx(0.25)
    assert (found["plans"], found["switches"], found["stall"]) == (2, 2, 0.5)
    assert (found["memory"], found["budget"]) == (2000.0, 2500.0)
    assert found["slices_save"] == pytest.approx(1.5)  # of the iteration that has both
    assert found["measured_to_predicted"] in (0.5, 2.0)


def test_numbers_are_finite_numbers() -> None:
    assert number(3) == 3.0
    for value in ("NaN", None, True, math.inf, [1.0]):
        assert number(value) is None
