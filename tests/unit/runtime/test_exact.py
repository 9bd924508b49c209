"""Exact sums of gradients on slabs: the same bits whatever the order, the users, the replicas."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_flex.runtime import exact
from megatron_flex.runtime.exact import BITS, GradientOverflowError
from megatron_flex.runtime.slab import Slab
from tests.close import assert_close
from tests.unit.runtime.slabs import make_slab


def empty() -> Slab:
    slab = make_slab((30, 20), (20,), exact=True)
    slab.grads.zero_()
    return slab


def gradients(count: int) -> list[torch.Tensor]:
    like = empty().grads
    return [
        torch.randn(like.shape, generator=torch.Generator().manual_seed(i)) * 10.0 ** (-i)
        for i in range(count)
    ]


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    slab = empty()
    for part in parts:
        slab.grads.copy_(part)
        assert exact.accumulate(slab, 5)
        assert not slab.grads.any()
    exact.finish(slab)
    assert slab.sums is not None
    assert not slab.sums.any(), "ready for the next iteration"
    return slab.grads


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


def test_the_order_of_micro_batches_does_not_matter() -> None:
    parts = gradients(4)
    floats = {tuple(bits(sum(order)).tolist()) for order in itertools.permutations(parts)}  # type: ignore[arg-type]
    assert len(floats) > 1, "in floating point it does"
    results = [bits(summed(list(order))) for order in itertools.permutations(parts)]
    for result in results[1:]:
        assert torch.equal(result, results[0])
    expected = sum(p.double() for p in parts)
    assert isinstance(expected, torch.Tensor)
    assert_close(summed(parts), expected, 1.5e-7)


def test_replicas_sum_to_what_one_device_has() -> None:
    parts = gradients(5)
    whole = summed(parts)
    replicas = [empty(), empty(), empty()]
    for number, part in enumerate(parts):
        slab = replicas[number % 2]  # the third has no micro-batch
        slab.grads.copy_(part)
        exact.accumulate(slab, 5)
    for slab in replicas[1:]:
        assert slab.sums is not None
        assert replicas[0].sums is not None
        replicas[0].sums += slab.sums
    exact.finish(replicas[0])
    assert torch.equal(bits(replicas[0].grads), bits(whole))


def test_two_users_of_a_tied_slab_are_rounded_apart() -> None:
    # Each of these is half a step: together one step, apart (to the even neighbour) none.
    half = 2.0 ** -(BITS + 1)
    slab = empty()
    for unit in (0, 9):
        slab.scratch(unit).fill_(half)
    for unit in (0, 9):
        assert exact.accumulate(slab, unit)
        assert not slab.scratch(unit).any()
    exact.finish(slab)
    assert not slab.grads.any()
    apart = [empty(), empty()]  # as on two devices
    for other in apart:
        other.grads.fill_(half)
        exact.accumulate(other, 0)
        exact.finish(other)
        assert not other.grads.any()


def test_a_backward_of_both_users_reaches_both_scratch_buffers() -> None:
    slab = empty()
    users = [slab.parameters_of(0), slab.parameters_of(9)]
    (users[0]["p0"].sum() + 2.0 * users[1]["p0"].sum()).backward()
    for unit in (0, 9):
        assert exact.accumulate(slab, unit)
    exact.finish(slab)
    weight, bias = (slab.view(slab.grads, entry) for entry in slab.layout.entries)
    assert (weight == 3.0).all()
    assert not bias.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_told_and_not_raised(value: float) -> None:
    slab = empty()
    slab.grads[7] = value
    assert exact.accumulate(slab, 5) is False
    assert not slab.grads.any()


@pytest.mark.parametrize("value", [128.0, -128.0, 3e38])
def test_an_overflow_is_an_error_that_names_the_unit(value: float) -> None:
    slab = empty()
    slab.grads[7] = value
    with pytest.raises(GradientOverflowError, match=r"a gradient of unit 5 is 128 or larger.*--lr"):
        exact.accumulate(slab, 5)
    slab = empty()
    slab.grads[7] = value * 0.99 if abs(value) < 1e3 else 127.9
    assert exact.accumulate(slab, 5) is True


def test_exact_sums_need_a_slab_that_has_them() -> None:
    with pytest.raises(AssertionError, match="no exact sums"):
        exact.accumulate(make_slab((3, 4)), 0)
