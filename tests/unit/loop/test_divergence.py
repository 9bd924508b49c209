"""When a run has come apart."""

from __future__ import annotations

import pytest
import torch

from megatron_flex.loop.divergence import PATIENCE, DivergedError, Divergence, usable


def test_a_run_ends_after_a_few_iterations_in_a_row_not_in_all() -> None:
    divergence = Divergence()
    for iteration in range(4 * PATIENCE):
        finite = iteration % PATIENCE == PATIENCE - 1
        divergence.add(iteration, finite=finite, advice=lambda: "never")
        assert divergence.suspected == (not finite)
    for iteration in range(PATIENCE - 1):
        divergence.add(iteration, finite=False, advice=lambda: "never")
    with pytest.raises(DivergedError, match=rf"in {PATIENCE} iterations .*\(up to 99\).*: rest"):
        divergence.add(99, finite=False, advice=lambda: "rest")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["decoder.weight", "optimizer.state.exp_avg.decoder.weight"])
def test_a_state_with_one_value_that_is_not_finite_is_of_no_use(
    dtype: torch.dtype, name: str
) -> None:
    state = {name: torch.randn(300, dtype=dtype), "steps": torch.tensor([3]), "no": torch.empty(0)}
    assert usable(state)
    for value in (float("nan"), float("inf"), -float("inf")):
        broken = state[name].clone()
        broken[17] = value
        assert not usable({**state, name: broken})


def test_weights_beyond_use_are_refused_and_large_moments_are_not() -> None:
    large = torch.full((3,), -1e20)
    assert not usable({"decoder.weight": large})
    assert usable({"optimizer.state.exp_avg_sq.decoder.weight": -large})
