"""The number of ranks that share each layer, chosen from what is predicted of each."""

from __future__ import annotations

import pytest

from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.tensor_choice import Outlook, best, in_words, reasons, sizes


def test_sizes_divide_servers_and_the_job() -> None:
    assert sizes(16, 8) == (1, 2, 4, 8)
    assert sizes(6, 6) == (1, 2)
    assert sizes(3, 3) == (1,)


def test_a_larger_group_must_gain_more_than_the_model_can_tell() -> None:
    found = [Outlook(1, 1.0, "a"), Outlook(2, 0.99, "b"), Outlook(4, 2.0, "c")]
    chosen = best(found)
    assert chosen.size == 1
    assert reasons(found, chosen)[-1].endswith("within 2% of the fastest, with fewer in a group")
    found[1] = Outlook(2, 0.9, "b")
    assert best(found).size == 2
    assert reasons(found, best(found))[-1] == "chosen: tensor parallelism 2, the fastest"


def test_plans_in_words() -> None:
    assert in_words(Plan.parse("0:3@0,1 | 3:8@2")) == "2 stages on 2+1 devices"
    assert in_words(Plan.parse("0:3@0 | 3:8@0")) == "2 stages on 1+1 devices, 1 in turn"


def test_what_cannot_be_is_said_and_not_chosen() -> None:
    found = [Outlook(1, problem="it needs 3 GB more"), Outlook(2, 5.0, "b", 2e9)]
    assert best(found).size == 2
    assert reasons(found, best(found))[0].endswith("cannot be: it needs 3 GB more")
    with pytest.raises(PlanError, match=r"auto finds no size that can be: .*3 GB more"):
        best(found[:1])
