from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.errors import DataError
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.data.microbatches import CostCoefficients, cut_by_count, cut_by_tokens
from megatron_flex.data.mock import mixture_lengths

lengths_lists = st.lists(st.integers(1, 300), min_size=1, max_size=80)
coefficients = st.builds(CostCoefficients, st.floats(0.1, 10), st.floats(0, 1))


def batch(lengths: list[int] | np.ndarray, first: int = 1000) -> GlobalBatch:
    array = np.asarray(lengths, dtype=np.int64)
    return GlobalBatch(first, array, (int(array.sum()),))


def cost(micro_batch: MicroBatch, c: CostCoefficients) -> float:
    return c.linear * micro_batch.tokens + c.quadratic * micro_batch.squares


def assert_partition(cut: tuple[MicroBatch, ...], whole: GlobalBatch) -> None:
    slices = sorted((s for m in cut for s in m.slices), key=lambda s: s.sample)
    assert [s.sample for s in slices] == list(range(1000, 1000 + whole.size))
    assert [s.stop for s in slices] == whole.lengths.tolist()
    assert all(s.start == 0 for s in slices)


@given(lengths_lists, st.integers(1, 600), coefficients)
def test_each_sample_is_in_one_micro_batch_within_the_budget(
    lengths: list[int], budget: int, c: CostCoefficients
) -> None:
    whole = batch(lengths)
    cut = cut_by_tokens(whole, budget, c)
    assert_partition(cut, whole)
    assert all(m.tokens <= budget or len(m.slices) == 1 for m in cut)
    assert cut == cut_by_tokens(batch(lengths), budget, c)


@given(lengths_lists, st.integers(300, 3000), coefficients)
def test_there_are_few_micro_batches(lengths: list[int], budget: int, c: CostCoefficients) -> None:
    cut = cut_by_tokens(batch(lengths), budget, c)
    # A bin is added only when a sample fits none: then all are more than half full.
    assert len(cut) <= max(2 * -(-sum(lengths) // budget), -(-sum(lengths) // budget) + 3)


@given(lengths_lists, st.integers(1, 600), coefficients)
def test_cheap_micro_batches_come_first_and_last(
    lengths: list[int], budget: int, c: CostCoefficients
) -> None:
    costs = [cost(m, c) for m in cut_by_tokens(batch(lengths), budget, c)]
    peak = int(np.argmax(costs))
    tolerance = 1e-9 * max(costs)
    assert all(np.diff(costs[: peak + 1]) >= -tolerance)
    assert all(np.diff(costs[peak:]) <= tolerance)
    assert [costs[0], *costs[1:][-1:]] == pytest.approx(sorted(costs)[:2])


def test_a_micro_batch_is_filled_exactly_also_when_it_had_no_room_before() -> None:
    # By cost the two of 4 tokens are together, which leaves no room for 3, but for 2.
    cut = cut_by_tokens(batch([6, 4, 4, 3, 2]), 10, CostCoefficients(0.0, 1.0))
    assert sorted(sorted(s.tokens for s in m.slices) for m in cut) == [[2, 4, 4], [3, 6]]
    # And here every micro-batch is filled at once.
    cut = cut_by_tokens(batch([6, 6, 4, 4]), 10, CostCoefficients())
    assert [m.tokens for m in cut] == [10, 10]


@pytest.mark.parametrize("quadratic", [0.0, 1e-4, 1e-3])
@pytest.mark.parametrize("budget", [8192, 32768])
def test_costs_are_even_where_no_sample_is_large(quadratic: float, budget: int) -> None:
    c = CostCoefficients(1, quadratic)
    lengths = np.minimum(mixture_lengths(7, np.arange(1024)), 2048)
    cut = cut_by_tokens(batch(lengths), budget, c)
    costs = [cost(m, c) for m in cut]
    assert max(costs) < 1.05 * np.mean(costs)
    assert len(cut) <= int(lengths.sum()) // budget + 2


def test_a_long_sample_is_balanced_by_cost_not_by_tokens() -> None:
    # Situation 12: 4,000 tokens among samples of 20. By tokens all micro-batches would be full.
    c = CostCoefficients(1, 1e-2)
    cut = cut_by_tokens(batch([20] * 1000 + [4000]), 5000, c)
    (long,) = [m for m in cut if any(s.tokens == 4000 for s in m.slices)]
    assert long.tokens == 4000
    others = [m.tokens for m in cut if m is not long]
    assert max(others) - min(others) <= 20


def test_a_sample_beyond_the_budget_is_alone() -> None:
    cut = cut_by_tokens(batch([50, 900, 50]), 100, CostCoefficients())
    assert sorted(len(m.slices) for m in cut) == [1, 2]


@given(lengths_lists, st.integers(1, 90))
def test_cutting_by_count_keeps_the_order_of_samples(lengths: list[int], size: int) -> None:
    whole = batch(lengths)
    cut = cut_by_count(whole, size)
    assert_partition(cut, whole)
    assert [len(m.slices) for m in cut[:-1]] == [size] * (len(cut) - 1)
    assert [s.sample for m in cut for s in m.slices] == list(range(1000, 1000 + whole.size))


def test_bad_sizes_are_named() -> None:
    with pytest.raises(DataError, match="--micro-batch-size"):
        cut_by_count(batch([1]), 0)
    with pytest.raises(DataError, match="--micro-batch-tokens"):
        cut_by_tokens(batch([1]), 0, CostCoefficients())
    with pytest.raises(DataError, match="positive"):
        CostCoefficients(0, 0)


def test_four_thousand_samples_are_cut_in_milliseconds() -> None:
    whole = batch(mixture_lengths(1, np.arange(4096)))
    times = []
    for _ in range(5):
        start = time.process_time()
        cut_by_tokens(whole, 16384, CostCoefficients(1, 1e-4))
        times.append(time.process_time() - start)
    assert min(times) < 0.1  # of this process; about 0.01


@pytest.mark.parametrize(
    ("lengths", "micro_batches"),
    [
        ([60, 40], [[60, 40]]),
        ([100, 100], [[100], [100]]),
        # By cost the second micro-batch is the cheaper one when 30 comes, but has no room; the last
        # sample fills it exactly.
        ([60, 40, 35, 30, 25], [[60, 30], [40, 35, 25]]),
    ],
)
def test_what_fits_exactly_shares_a_micro_batch(
    lengths: list[int], micro_batches: list[list[int]]
) -> None:
    cut = cut_by_tokens(batch(lengths), 100, CostCoefficients(0, 1))
    assert sorted([s.tokens for s in m.slices] for m in cut) == sorted(micro_batches)
