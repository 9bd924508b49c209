"""Plans and their text form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.planner.plan import OPlan, Plan, PlanError, Stage


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    device = 0
    stages, begin = [], 0
    for size in sizes:
        degree = draw(st.integers(1, 3))
        device += draw(st.integers(0, 1))  # some devices are idle
        stages.append(Stage(begin, begin + size, tuple(range(device, device + degree))))
        begin, device = begin + size, device + degree
    units = st.lists(st.integers(0, begin - 1), unique=True).map(sorted).map(tuple)
    recompute = draw(units)
    activations = tuple(u for u in draw(units) if u not in recompute)
    optimizer = draw(units)
    shard = tuple(u for u in draw(units) if u not in optimizer)
    o_plan = OPlan(recompute, optimizer, activations, draw(st.booleans()), shard)
    return Plan(tuple(stages), o_plan)


@given(plans())
def test_the_text_form_round_trips(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


def test_the_text_form_is_as_documented() -> None:
    plan = Plan.parse("0:5@0-1 | 5:9@2 ; recompute 1-3,6 ; activations 4")
    assert plan.o_plan == OPlan(recompute=(1, 2, 3, 6), activations=(4,))
    assert str(plan) == "0:5@0,1 | 5:9@2 ; recompute 1-3,6 ; activations 4"
    assert plan != Plan(plan.stages)
    assert str(Plan.parse("0:5@0-1;lean ; optimizer 3")) == "0:5@0,1 ; optimizer 3 ; lean"
    assert plan.stages == Plan(plan.stages).stages
    assert Plan.parse("0:5@0;optimizer  1 - 2 , 4").o_plan.optimizer == (1, 2, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:5@0 | 6:9@1", "must start at unit 5"),
        ("0:5@0 ; recompute 5", "names unit 5"),
        ("0:5@0 ; recompute 3-1", "lower number first"),
        ("0:5@0 ; recompute 1,1", "ascend"),
        ("0:5@0 ; recompute 1 ; activations 1", "choose one"),
        ("0:5@0 ; recompute 1 ; recompute 2", "at most once"),
        ("0:5@0 ; forget 1", "recompute, optimizer, activations"),
        ("0:5@0 ; optimizer x", "not units"),
        ("0:5@0 ; optimizer 1 2", "'1 2' are not units"),
        ("0:5@0 ; recompute 1-2 4", "'1-2 4' are not units"),
        ("0:5@0 ; recompute 0-99999999999", "no unit or device has such a number"),
        ("0:5@0-99999999999", "no unit or device has such a number"),
        ("0:5@0,1 ; optimizer 1-3 ; shard 3,4", "unit 3 is split over its replicas and goes to"),
        ("0:5@0,1 ; shard 5", "memory optimisation names unit 5"),
        ("0:5@a", "expected START:STOP@DEVICES"),
    ],
)
def test_a_bad_text_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.parse(text)


def test_the_message_about_a_plan_of_very_many_devices_can_be_read() -> None:
    with pytest.raises(PlanError, match=r"covers 9 units, the model has 8") as caught:
        Plan.parse("0:9@0-99999").check(8, 4)
    assert len(str(caught.value)) < 1000


def test_units_of_several_holders_are_sharded_but_for_those_on_the_host() -> None:
    plan = Plan.parse("0:2@0,1 | 2:4@2 | 4:6@0,1 ; optimizer 1,2 ; shard 3")
    assert str(plan.sharded()) == "0:2@0,1 | 2:4@2 | 4:6@0,1 ; optimizer 1-2 ; shard 0,4-5"


def test_a_plan_with_other_shards_does_not_keep_everything_where_it_is() -> None:
    plan = Plan.parse("0:2@0,1 | 2:4@2")
    assert plan.keeps(Plan.parse("0:2@0,1 | 2:4@2 ; recompute 1 ; optimizer 2"))
    assert not plan.keeps(Plan.parse("0:2@0,1 | 2:4@2 ; shard 1"))
    assert not plan.keeps(Plan.parse("0:2@0,1 | 2:4@3"))


def test_schedule_and_spare_bytes_are_part_of_the_text() -> None:
    text = "0:5@0,1 | 5:9@2 ; recompute 1-3 ; schedule zb-v ; spare 1200"
    plan = Plan.parse(text)
    assert (plan.schedule, plan.spare) == ("zb-v", 1200)
    assert str(plan) == text
    assert Plan.parse(str(plan)) == plan
    assert plan.keeps(Plan.parse("0:5@0,1 | 5:9@2"))


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("schedule", "expected one schedule"),
        ("schedule zb ; schedule zb", "expected one schedule"),
        ("schedule Z_B", "'Z_B' is no name of a schedule"),
        ("spare -3", "expected a number of bytes"),
        ("spare 1 ; spare 2", "at most one number of spare bytes"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(end: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Plan.parse(f"0:9@0 ; {end}")


def test_the_shape_counts_devices_where_one_holds_several_stages() -> None:
    assert Plan.parse("0:5@0,1 | 5:9@2").shape == "(2,1)"
    assert Plan.parse("0:3@0 | 3:6@1 | 6:8@0").shape == "(1,1,1) on 2"
    many = "0:1@0,1 | " + " | ".join(f"{i}:{i + 1}@{i + 1}" for i in range(1, 10))
    assert Plan.parse(many).shape == "(2,9×1)"
    assert Plan.parse(many.rpartition(" | ")[0]).shape == "(2,1,1,1,1,1,1,1,1)"
