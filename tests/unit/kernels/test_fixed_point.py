"""Fixed-point sums of gradients against Python's integers: exact in any order and any split."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_flex import native

BITS = 44
FINE, TOO_LARGE, NOT_FINITE = 0, 1, 2
#: The first float32 that is refused with 44 bits, and the last that is not.
LIMIT = 2.0 ** (51 - BITS)
BELOW = float(np.nextafter(np.float32(LIMIT), np.float32(0)))

FLOATS = st.floats(-BELOW, BELOW, width=32) | st.floats(-(2.0**-38), 2.0**-38, width=32)


def accumulate(gradient: Tensor, sums: Tensor, bits: int = BITS, threads: int = 1) -> int:
    verdict = native.function("mflex_fixed_accumulate")(
        gradient.data_ptr(), sums.data_ptr(), gradient.numel(), bits, threads
    )
    assert isinstance(verdict, int)
    return verdict


def finish(sums: Tensor, bits: int = BITS, threads: int = 1) -> Tensor:
    gradient = torch.full((sums.numel(),), float("nan"))
    native.function("mflex_fixed_finish")(
        sums.data_ptr(), gradient.data_ptr(), sums.numel(), bits, threads
    )
    return gradient


def zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def spread(count: int, seed: int) -> Tensor:
    """Gradients over the whole range of sizes, most of them small."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.uniform(-60, 6.9, count)) * rng.choice([-1.0, 0.0, 1.0], count)
    return torch.from_numpy(sizes.astype(np.float32))


@given(st.lists(FLOATS, min_size=1, max_size=40), st.integers(20, 44))
def test_each_element_is_rounded_to_nearest_even(values: list[float], bits: int) -> None:
    gradient, sums = torch.tensor(values), zeros(len(values))
    assert accumulate(gradient, sums, bits) == FINE
    # round() of a fraction is exact and goes to the even neighbour.
    assert sums.tolist() == [round(Fraction(v) * 2**bits) for v in values]
    assert not gradient.any(), "the gradient is cleared"


@pytest.mark.parametrize(
    ("halves", "expected"),
    [(1, 0), (3, 2), (5, 2), (7, 4), (-1, 0), (-3, -2), (-5, -2), (2, 1), (-2, -1), (0, 0)],
)
def test_ties_go_to_the_even_neighbour(halves: int, expected: int) -> None:
    sums = zeros(19)  # a whole vector and a tail
    assert accumulate(torch.full((19,), halves * 2.0 ** -(BITS + 1)), sums) == FINE
    assert sums.tolist() == [expected] * 19


@given(st.lists(st.lists(FLOATS, min_size=5, max_size=5), min_size=2, max_size=8), st.randoms())
def test_a_sum_is_exact_in_any_order_and_over_any_replicas(
    parts: list[list[float]], rng: random.Random
) -> None:
    expected = [sum(round(Fraction(v) * 2**BITS) for v in column) for column in zip(*parts)]  # noqa: B905
    for _ in range(3):
        rng.shuffle(parts)
        replicas = [zeros(5) for _ in range(rng.randint(1, 3))]
        for part in parts:
            assert accumulate(torch.tensor(part), rng.choice(replicas)) == FINE
        whole = torch.stack(replicas).sum(0)  # what the reduction does
        assert whole.tolist() == expected


def test_many_contributions_do_not_drift() -> None:
    # In float32 a tenth, added 4,096 times, is 409.6003.
    gradient, sums = torch.empty(3), zeros(3)
    for _ in range(4096):
        gradient.fill_(0.1)
        assert accumulate(gradient, sums) == FINE
    tenth = round(Fraction(float(np.float32(0.1))) * 2**BITS)
    assert sums.tolist() == [4096 * tenth] * 3
    assert finish(sums).tolist() == [float(np.float32(4096 * tenth * 2.0**-BITS))] * 3


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=40))
def test_the_sum_is_turned_back_to_float32_and_cleared(values: list[int]) -> None:
    sums = torch.tensor(values, dtype=torch.int64)
    expected = (sums.numpy().astype(np.float64) * 2.0**-BITS).astype(np.float32)
    got = finish(sums)
    assert got.numpy().tobytes() == expected.tobytes()
    assert not sums.any(), "the sum is cleared"


@given(FLOATS)
def test_a_lone_contribution_comes_back_within_half_a_step(value: float) -> None:
    sums = zeros(1)
    accumulate(torch.tensor([value]), sums)
    (back,) = finish(sums).tolist()
    assert abs(Fraction(back) - Fraction(value)) <= Fraction(1, 2 ** (BITS + 1))


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 7, 16, 40_000, 99_999])
def test_one_element_that_is_not_finite_is_reported(value: float, place: int) -> None:
    for threads in (1, 3):
        gradient = torch.ones(100_000)
        gradient[place] = value
        assert accumulate(gradient, zeros(100_000), threads=threads) == NOT_FINITE
        assert not gradient.any(), "also what is of no use is cleared"


@pytest.mark.parametrize("value", [LIMIT, -LIMIT, 3e38, -3e38])
@pytest.mark.parametrize("place", [0, 7, 16, 40_000, 99_999])
def test_one_element_that_is_too_large_is_reported(value: float, place: int) -> None:
    for threads in (1, 3):
        gradient = torch.ones(100_000)
        gradient[place] = value
        assert accumulate(gradient, zeros(100_000), threads=threads) == TOO_LARGE


def test_not_finite_counts_more_than_too_large() -> None:
    for values in ([1e30, float("nan"), 0.0], [float("inf"), 1e30, 0.0]):
        gradient = torch.tensor(values).repeat_interleave(40_000)
        assert accumulate(gradient, zeros(120_000), threads=4) == NOT_FINITE


@pytest.mark.parametrize("value", [BELOW, -BELOW])
def test_the_largest_that_fits_is_exact(value: float) -> None:
    sums = zeros(9)
    assert accumulate(torch.full((9,), value), sums) == FINE
    assert sums.tolist() == [int(Fraction(value) * 2**BITS)] * 9
    assert finish(sums).tolist() == [value] * 9


@pytest.mark.parametrize("count", [0, 1, 7, 31, 32_768, 32_769, 100_003])
def test_the_number_of_threads_does_not_matter(count: int) -> None:
    results = []
    for threads in (1, 2, 3, 5, 0):
        sums = torch.arange(count, dtype=torch.int64)
        for seed in range(3):
            assert accumulate(spread(count, seed), sums, threads=threads) == FINE
        results.append((sums.clone(), finish(sums, threads=threads)))
    for sums, gradient in results[1:]:
        assert torch.equal(sums, results[0][0])
        assert torch.equal(gradient.view(torch.int32), results[0][1].view(torch.int32))


def test_nothing_beyond_the_count_is_touched() -> None:
    gradient, sums = torch.ones(64), zeros(64)
    assert native.function("mflex_fixed_accumulate")(
        gradient.data_ptr(), sums.data_ptr(), 37, BITS, 1
    ) == FINE  # fmt: skip
    assert gradient.count_nonzero() == 27
    assert sums.count_nonzero() == 37
    native.function("mflex_fixed_finish")(sums.data_ptr(), gradient.data_ptr(), 36, BITS, 1)
    assert sums.count_nonzero() == 1
    assert gradient.count_nonzero() == 36 + 27
