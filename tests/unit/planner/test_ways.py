"""Ways of cutting a batch that a planner chooses among."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.cut import Cut
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.planner.messages import Question
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.service import Service
from megatron_flex.planner.ways import batch_of, targets, ways
from tests.unit.planner.test_service import LONG, SETUP, SHORT

OPEN = Cut(by_cost=True, sliced=True, cost=CostCoefficients(1.0, 1e-4))
lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=40).map(tuple)


@given(lengths, st.integers(2, 64))
def test_targets_cover_one_to_sixteen_micro_batches_a_device(
    samples: tuple[int, ...], devices: int
) -> None:
    found = targets(OPEN, samples, devices)
    total = sum(map(OPEN.cost.of, samples))
    assert found == sorted(found, reverse=True)
    assert len(found) == len(set(found))
    for share, target in ((1, found[0]), (16, found[-1])):
        exact = max(128, OPEN.cost.tokens(total / devices / share))
        assert exact / 2**0.3 <= target <= exact * 2**0.3


def test_a_batch_that_is_huge_for_its_devices_may_be_cut_finer() -> None:
    """Else its micro-batches take memory, until all is recomputed or nothing fits."""
    finest = [ways(OPEN, (400,) * samples, 4)[-1].tokens.max() for samples in (100, 1_000, 20_000)]
    assert max(finest) < 10_000


@given(lengths)
def test_flags_that_fix_the_cut_leave_one_way(samples: tuple[int, ...]) -> None:
    for cut in (Cut(500), Cut(500, by_cost=True, sliced=True), Cut(count=2)):
        (only,) = ways(cut, samples, 4)
        assert only.target == (500 if cut.by_cost else 0)
        if cut.by_cost:
            assert only.key == batch_of(cut, samples, 77).key


@given(lengths, st.integers(1, 8))
def test_every_way_has_all_tokens_and_says_its_target(
    samples: tuple[int, ...], devices: int
) -> None:
    for batch in ways(OPEN, samples, devices):
        assert batch.tokens.sum() == sum(samples)
        assert batch.squares.sum() == sum(n * n for n in samples)
        assert batch.key == batch_of(OPEN, samples, batch.target).key
        chained = {m for chain in batch.chains for m in chain}
        assert chained == set(np.flatnonzero(batch.sliced).tolist())


@pytest.mark.parametrize("name", ["lookahead", "hbsa", "static", "exhaustive"])
def test_every_planner_says_how_the_batch_is_cut(name: str) -> None:
    options = replace(SETUP.options, planner=name, schedule="auto")  # type: ignore[arg-type]
    service = Service(replace(SETUP, cut=OPEN, options=options))
    answer = service.answer(Question(1, (LONG, SHORT)))
    assert answer.decision is not None
    plan = answer.decision.plan
    assert plan.cut in targets(OPEN, LONG, 4)
    assert Plan.parse(str(plan)) == plan
    # One of 3,000 tokens among short ones: whole, it takes as long as nearly all work together.
    if name != "hbsa":  # it finds one stage on all devices, where slices gain nothing
        assert answer.whole > 1.3 * answer.decision.predicted.seconds
    following = service.answer(Question(2, (SHORT,), str(plan), LONG)).decision
    assert following is not None
    assert following.plan.cut in targets(OPEN, SHORT, 4)


def test_fixed_slices_are_planned_too() -> None:
    cut = Cut(512, slice_tokens=256, cost=CostCoefficients(1.0, 1e-4))
    service = Service(replace(SETUP, cut=cut))
    answer = service.answer(Question(1, (LONG,)))
    assert answer.decision is not None
    assert answer.decision.plan.cut == 0
    assert answer.whole > answer.decision.predicted.seconds
