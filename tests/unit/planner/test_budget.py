"""The smallest budget that would do, by trying."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.planner.budget import budget_advice, smallest_budget


@given(st.integers(10**5, 10**12), st.floats(1.001, 1000.0), st.floats(0.0, 3.0))
def test_what_is_found_fits_and_is_hardly_more_than_needed(
    refused: int, factor: float, guess: float
) -> None:
    needed = refused * factor
    tried = []

    def fits(budget: int) -> bool:
        tried.append(budget)
        return budget >= needed

    found = smallest_budget(fits, refused, guess * (needed - refused))
    assert found is not None
    assert found in tried
    assert needed <= found <= 1.0101 * needed
    assert len(f"{found}".rstrip("0")) <= 3
    assert len(tried) < 50


def test_nothing_is_promised_where_nothing_fits_or_time_is_up() -> None:
    assert smallest_budget(lambda _: False, 1e9, 1e6) is None
    assert smallest_budget(lambda b: b > 9e9, 1e9, 1e6, seconds=0.0) is None


@pytest.mark.parametrize(
    ("size", "reserved", "text"),
    [
        (12_300_000, 0, "12.3 MB (--budget 0.0123)"),
        (45_600_000_000, 5_000_000_000, "45.6 GB (--budget 45.6), on devices of 50.6 GB with the"),
    ],
)
def test_sizes_are_given_in_words_and_as_the_flag_takes_them(
    size: int, reserved: int, text: str
) -> None:
    assert f"would do is {text}" in budget_advice(size, "--budget", reserved)
