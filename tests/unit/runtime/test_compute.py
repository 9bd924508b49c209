"""What the halves of a split backward leave and take."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_flex.schedule.instructions import BackwardInput, BackwardWeight
from tests.unit.runtime.test_memory import WHOLE, Worker


@pytest.mark.parametrize(
    ("o_plan", "units"),
    [("", 8), (" ; recompute 1,3", 6), (" ; activations 2,4-6", 4), (" ; recompute 0,7", 7)],
)
def test_a_unit_that_is_recomputed_or_offloaded_owes_nothing(o_plan: str, units: int) -> None:
    worker = Worker(WHOLE + o_plan)
    handlers, owed = worker.executor.handlers, []
    half, rest = handlers[BackwardInput], handlers[BackwardWeight]

    def count(run: Any, op: Any) -> None:
        half(run, op)
        owed.append(len(run.tapes[op.stage, op.micro_batch]))

    def check(run: Any, op: Any) -> None:
        tape = run.tapes[op.stage, op.micro_batch]
        rest(run, op)
        assert len(tape) == 0

    handlers[BackwardInput], handlers[BackwardWeight] = count, check
    worker.step(policy="zb")
    # Two linear layers a unit; two tables in the embedding; the head has one layer.
    assert set(owed) == {2 * units - (7 not in worker.plan.o_plan.recompute)}
    assert len(owed) > 1
