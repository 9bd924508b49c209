"""Averages between log lines."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.telemetry.interval import Interval
from tests.unit.telemetry.records import record


def test_a_line_is_due_at_multiples_and_after_the_first_iteration() -> None:
    interval = Interval(5, 1)
    due = [k for k in range(3, 21) if interval.add(record(k)) is not None]
    assert due == [3, 5, 10, 15, 20]


def test_the_first_iteration_stays_in_the_interval_that_it_begins() -> None:
    interval = Interval(3, 1)
    first = interval.add(record(1, losses={"lm loss": 9.0}))
    assert first is not None
    assert first.losses == {"lm loss": 9.0}
    assert interval.add(record(2, losses={"lm loss": 6.0})) is None
    third = interval.add(record(3, losses={"lm loss": 3.0}))
    assert third is not None
    assert (third.iterations, third.losses) == (3, {"lm loss": 6.0})
    sixth = [interval.add(record(k)) for k in (4, 5, 6)][-1]
    assert sixth is not None
    assert sixth.iterations == 3


def test_skipped_iterations_do_not_count_in_the_losses() -> None:
    interval = Interval(4, 1)
    interval.add(record(1, losses={"lm loss": 2.0}))
    interval.add(record(2, losses={"lm loss": math.nan}, skipped=True))
    interval.add(record(3, losses={"lm loss": 1.0}, skipped=True))
    summary = interval.add(record(4, losses={"lm loss": 4.0}, skipped=True, finite=False))
    assert summary is not None
    assert summary.losses == {"lm loss": 2.0}
    assert (summary.skipped, summary.nan) == (3, 2)


def test_an_interval_without_updates_has_no_loss() -> None:
    summary = Interval(1, 1).add(record(1, skipped=True))
    assert summary is not None
    assert summary.losses == {}


@given(
    st.lists(
        st.tuples(
            st.floats(1e-3, 10), st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1e15)
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 64),
)
def test_rates_are_totals_over_time(
    rows: list[tuple[float, int, int, float]], world_size: int
) -> None:
    interval = Interval(len(rows), world_size, peak_flops=1e14)
    summary = None
    for k, (elapsed, tokens, padding, flops) in enumerate(rows, 1):
        r = record(k, elapsed=elapsed, tokens=tokens, padding=padding, flops=flops)
        summary = interval.add(r)
    assert summary is not None
    time = sum(row[0] for row in rows)
    assert summary.seconds_per_iteration * len(rows) == pytest.approx(time)
    rates = summary.throughput
    assert rates.tokens_per_second * time == pytest.approx(sum(row[1] for row in rows))
    assert rates.tflops * world_size * time == pytest.approx(sum(row[3] for row in rows) / 1e12)
    assert rates.mfu_percent == pytest.approx(rates.tflops)
    assert 0.0 <= rates.padding_percent <= 100.0


def test_a_clock_that_stands_still_is_no_division_by_zero() -> None:
    summary = Interval(1, 1).add(record(1, elapsed=0.0))
    assert summary is not None
    assert math.isfinite(summary.throughput.tokens_per_second)


def test_the_time_of_an_iteration_is_that_of_all_skipped_ones_included() -> None:
    interval = Interval(4, 1)
    summaries = [
        interval.add(record(k, elapsed=float(k), skipped=k in (2, 4))) for k in range(1, 5)
    ]
    assert summaries[-1] is not None
    assert summaries[-1].seconds_per_iteration == 2.5
    assert summaries[-1].skipped == 2
