"""The size of the global batch over a run."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_flex.batch_size import BatchSizeSchedule


@st.composite
def _ramps(draw: st.DrawFn) -> BatchSizeSchedule:
    start, increment = draw(st.integers(1, 50)), draw(st.integers(1, 20))
    steps, samples = draw(st.integers(0, 12)), draw(st.integers(0, 2000))
    return BatchSizeSchedule(start + steps * increment, (start, increment, samples))


_SCHEDULES = st.one_of(_ramps(), st.integers(1, 100).map(BatchSizeSchedule))


# 1 / (1 / 49) rounds to just below 49: at the end of this ramp one step is still missing.
@example(BatchSizeSchedule(50, (1, 1, 1)), [])
@given(_ramps(), st.lists(st.integers(0, 3000), max_size=20))
def test_sizes_are_those_of_megatron_core(schedule: BatchSizeSchedule, consumed: list[int]) -> None:
    from megatron.core.num_microbatches_calculator import (
        RampupBatchsizeNumMicroBatchesCalculator,
    )

    assert schedule.rampup is not None
    start, increment, samples = schedule.rampup
    consumed = [*consumed, samples, samples + 1]
    if start == schedule.final or samples == 0:
        assert {schedule.size(c) for c in consumed} == {schedule.final}
        return  # megatron-core divides by zero
    theirs = RampupBatchsizeNumMicroBatchesCalculator(
        schedule.final, 1, 1, False, 1, start, increment, samples
    )
    for number in consumed:
        theirs.update(number, consistency_check=False)
        assert schedule.size(number) == theirs.current_running_global_batch_size


@given(_SCHEDULES, st.integers(0, 3000))
def test_the_number_of_iterations_is_that_of_megatron(
    schedule: BatchSizeSchedule, samples: int
) -> None:
    # Megatron-LM's update_train_iters.
    iterations = consumed = 0
    if schedule.rampup is not None:
        while consumed <= schedule.rampup[2] and consumed <= samples:
            consumed += schedule.size(consumed)
            iterations += 1
    if samples > consumed:
        iterations += (samples - consumed) // schedule.final
    assert schedule.iterations(samples) == iterations


@given(_SCHEDULES)
def test_consumed_samples_are_the_sum_of_the_sizes(schedule: BatchSizeSchedule) -> None:
    consumed = 0
    for iteration in range(200):
        assert schedule.consumed_samples(iteration) == consumed
        consumed += schedule.size(consumed)


@given(_SCHEDULES, st.integers(0, 3000), st.integers(0, 3000))
def test_the_size_never_falls(schedule: BatchSizeSchedule, one: int, other: int) -> None:
    less, more = sorted((one, other))
    assert schedule.size(less) <= schedule.size(more) <= schedule.final


@pytest.mark.parametrize(
    ("final", "ramp", "message"),
    [
        (0, None, "--global-batch-size must be at least 1"),
        (8, (0, 4, 10), "at least 1"),
        (8, (4, 0, 10), "at least 1"),
        (8, (4, 4, -1), "at least 1"),
        (8, (4, 3, 10), "steps of 3 do not lead from 4 to --global-batch-size 8"),
        (8, (12, 4, 10), "do not lead from 12"),
    ],
)
def test_a_ramp_that_leads_nowhere_is_refused(
    final: int, ramp: tuple[int, int, int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSizeSchedule(final, ramp)
