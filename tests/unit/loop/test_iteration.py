"""How micro-batches are cut is decided by the flags alone."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_flex.planner.flops import cost_coefficients, model_work
from tests.unit.planner.instances_real import small_model


def test_micro_batches_are_balanced_by_floating_point_operations() -> None:
    model = small_model(4)
    cost = cost_coefficients(model)
    lengths = np.array([1.0, 17.0, 400.0, 30000.0])
    work = np.array([sum(w.forward(n, n * n) for w in model_work(model)) for n in lengths])
    ours = cost.linear * lengths + cost.quadratic * lengths**2
    assert ours / ours[0] == pytest.approx(work / work[0])
    assert cost.linear == 1.0
