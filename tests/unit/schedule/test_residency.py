"""Which activations travel to the host, and when they begin to come back."""

from __future__ import annotations

import pytest

from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    GlobalNorm,
    RecvGradient,
)
from megatron_flex.schedule.residency import Travels, travels

PLAN = Plan.parse("0:4@0 | 4:8@1 ; activations 1")


@pytest.mark.parametrize(
    ("between", "away"),
    [
        ((), False),
        ((Forward(1, 0),), False),
        ((Forward(1, 0), Forward(2, 0)), True),  # leaves with the first, returns with the second
    ],
)
def test_activations_travel_where_there_is_an_operation_in_which_they_are_away(
    between: tuple[Forward, ...], away: bool
) -> None:
    found = travels((Forward(0, 0), *between, RecvGradient(0, 1, 1, 5), Backward(0, 0)), PLAN)
    if away:
        assert found == Travels(frozenset({(0, 0)}), {between[-1]: (0, 0)})
    else:
        assert found == Travels()


def test_only_stages_with_such_units_and_each_pass_by_its_first_backward() -> None:
    steps = (
        Forward(0, 0), Forward(0, 1), Forward(1, 0), Forward(1, 1), Forward(2, 0),
        BackwardInput(0, 1), BackwardInput(0, 0), BackwardWeight(0, 1), BackwardWeight(0, 0),
        GlobalNorm(),
    )  # fmt: skip
    found = travels(steps, PLAN)
    assert found.passes == {(0, 0)}
    assert found.back == {BackwardInput(0, 1): (0, 0)}
    assert travels(steps, Plan.parse("0:4@0 | 4:8@1")) == Travels()
