"""Plans that fit by their instruction lists."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flex.planner.build import Batch
from megatron_flex.planner.candidates import Candidate
from megatron_flex.planner.decision import Infeasible
from megatron_flex.planner.limits import MARGIN
from megatron_flex.planner.maker import Made
from megatron_flex.planner.plan import OPlan, Plan
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.pricing import Price
from megatron_flex.planner.simulation import place_plan
from tests.unit.planner.instances_real import drawn_batch, even_batch, small_model, small_planner

LAYOUT = Plan.parse("0:7@0 | 7:14@1")


def planner(budget: float = 80e9, **options: Any) -> Planner:
    given = {"schedule": "1f1b", "exact_memory": True, **options}
    return small_planner(2, config=small_model(6), budget=int(budget), **given)


def needed(batch: Batch) -> float:
    """Bytes of the fuller device without memory optimisation, and what is left free."""
    fitter = planner().fitter
    assert fitter is not None
    return max(fitter.maker.keep(LAYOUT, batch).peaks) / (1.0 - MARGIN)


def fitted(budget: float, batch: Batch, running: Plan | None = None, **options: Any) -> Candidate:
    p = planner(budget, **options)
    finder = p.finder([batch])
    return p.fitted(finder, finder.best_of(LAYOUT, None), running)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("part", [0.95, 0.85, 0.7])
def test_what_is_missing_is_saved_and_little_more(seed: int, part: float) -> None:
    batch = drawn_batch(seed)
    budget = part * needed(batch)
    price = fitted(budget, batch).price
    assert price.fits
    assert price.plan.o_plan
    assert max(price.device_bytes) <= (1.0 - MARGIN) * budget
    assert price.missing == pytest.approx((1.0 - part) * budget / part * (1 - MARGIN), rel=0.05)
    if part == 0.95:
        # One unit does not do more than half of all that can be done.
        every = sum(u.layer is not None for u in planner().units.layers.units)
        assert len(price.plan.o_plan.recompute) < every / 2


def test_a_plan_that_fits_by_its_program_is_left_alone_whatever_the_bound_says() -> None:
    batch = drawn_batch(1)
    budget = 1.001 * needed(batch)
    assert planner(budget).finder([batch]).best_of(LAYOUT, None).price.missing > 0
    price = fitted(budget, batch).price
    assert price.missing == 0.0
    assert not price.plan.o_plan


def test_a_running_o_plan_stays_while_it_fits_and_costs_hardly_more() -> None:
    batch = drawn_batch(2)
    budget = 0.9 * needed(batch)
    chosen = fitted(budget, batch).price
    for o_plan, stays in (
        (replace(chosen.plan.o_plan, optimizer=(1, *chosen.plan.o_plan.optimizer[1:])), None),
        (OPlan(recompute=(1,)), False),  # does not fit
        (OPlan(recompute=tuple(range(1, 13)), optimizer=tuple(range(14))), False),  # too slow
    ):
        running = replace(LAYOUT, o_plan=o_plan)
        price = fitted(budget, batch, running).price
        assert price.fits
        if stays is False:
            assert price.plan == chosen.plan
        else:
            assert price.seconds <= chosen.seconds * 1.02
    assert fitted(budget, batch, chosen.plan).price.plan == chosen.plan


def test_what_fits_nowhere_is_refused_with_the_device_its_bytes_and_the_flags() -> None:
    batch = drawn_batch(3)
    p = planner(0.2 * needed(batch))
    with pytest.raises(Infeasible) as caught:
        p.decide([batch], None)
    text = str(caught.value)
    assert "device " in text
    assert "B with recompute and offload in the best of them" in text
    for flag in ("--flexpipe-memory-budget-gb", "--micro-batch-tokens", "--overlong"):
        assert flag in text
    assert caught.value.shortfall > 0


def test_decisions_keep_to_the_budget_by_program() -> None:
    batch = drawn_batch(4)
    p = planner(0.75 * needed(batch))
    decision = p.decide([batch], None)
    assert p.fitter is not None
    assert max(p.maker.keep(decision.plan, batch).peaks) <= p.units.budget


UNEVEN = Plan.parse("0:7@0 | 7:14@1-3")


def uneven_planner(**options: Any) -> Planner:
    given = {"schedule": "1f1b", "exact_memory": True, **options}
    return small_planner(4, config=small_model(6), **given)


def test_room_for_what_is_out_of_step_is_given_up_first() -> None:
    batch = even_batch(24, 2048)

    def planned(budget: float, exact: bool) -> Price:
        p = uneven_planner(budget=int(budget), exact_memory=exact)
        finder = p.finder([batch])
        candidate = finder.best_of(UNEVEN, None)
        return p.fitted(finder, candidate).price

    lean = Plan(UNEVEN.stages, OPlan(lean=True))
    fitter = uneven_planner().fitter
    assert fitter is not None
    for exact in (True, False):
        if exact:
            much, little = (
                max(fitter.maker.keep(p, batch).peaks) / (1 - MARGIN) for p in (UNEVEN, lean)
            )
        else:
            much = max(planned(80e9, False).device_bytes)
            little = max(planned(0.99 * much, False).device_bytes)
        assert little < 0.99 * much
        roomy, tight, tighter = (
            planned(b, exact) for b in (1.001 * much, 0.999 * much, 0.99 * little)
        )
        assert roomy.plan.o_plan == OPlan()
        assert tight.plan == lean
        assert tight.missing <= 0
        assert max(tight.device_bytes) <= 1.001 * little
        assert tighter.plan.o_plan.lean
        assert tighter.plan.o_plan != OPlan(lean=True)
        assert tighter.fits


def test_the_bound_is_above_the_program_on_uneven_degrees() -> None:
    for seed in range(3):
        batch = drawn_batch(seed, samples=64)
        p = uneven_planner()
        finder = p.finder([batch])
        price = finder.best_of(UNEVEN, None).price
        assert p.fitter is not None
        for known, peak in zip(
            price.device_bytes, p.maker.keep(price.plan, batch).peaks, strict=True
        ):
            assert peak <= known


# -- optimizer state over replicas -------------------------------------------------------------

SHARDED = Plan.parse("0:7@0,1 | 7:14@2,3")


def sharding(budget: float = 80e9, **options: Any) -> Planner:
    return small_planner(
        4, config=small_model(6), budget=int(budget), schedule="1f1b",
        exact_memory=True, shard_optimizer=True, **options,
    )  # fmt: skip


def test_all_units_of_several_holders_are_sharded_in_every_plan() -> None:
    p, batch = sharding(), drawn_batch(1)
    finder = p.finder([batch])
    for layout in (SHARDED, Plan.parse("0:7@0-2 | 7:14@3")):
        found = p.fitted(finder, finder.best_of(layout, None)).plan
        assert found == layout.sharded()
    assert (plan := p.decide([batch], None).plan) == plan.sharded()


def test_a_sharded_state_is_not_sent_to_the_host() -> None:
    batch = drawn_batch(1)
    fitter = sharding().fitter
    assert fitter is not None
    p = sharding(0.95 * max(fitter.maker.keep(SHARDED.sharded(), batch).peaks))
    finder = p.finder([batch])
    price = p.fitted(finder, finder.best_of(SHARDED, None)).price
    assert price.fits
    assert price.plan.o_plan.recompute or price.plan.o_plan.activations
    assert price.plan.o_plan.shard == tuple(range(14))
    assert not price.plan.o_plan.optimizer


def test_a_plan_for_whose_cuts_there_is_no_room_is_not_run() -> None:
    p, batch = sharding(), drawn_batch(1)
    assert p.fitter is not None
    running = p.running(SHARDED.sharded(), batch)
    after = Plan.parse("0:7@0-2 | 7:14@3").sharded()
    assert p.fitter.hands_over(running, after)
    tight = replace(running, spare=(0.0,) * 4)
    assert not p.fitter.hands_over(tight, after)
    assert p.fitter.hands_over(tight, SHARDED.sharded())


@pytest.mark.parametrize("seed", range(2))
def test_auto_splits_the_backward_as_long_as_that_fits(seed: int) -> None:
    batch = drawn_batch(seed)

    def made(budget: float, schedule: str) -> tuple[Made, float]:
        fitter = planner(budget, schedule=schedule).fitter
        assert fitter is not None
        return fitter.maker.keep(LAYOUT, batch), fitter.maker.allowed

    fused = max(map(max, made(80e9, "1f1b")[0].memory))
    found = []
    for part in (1.01, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7):
        program, allowed = made(part * needed(batch), "auto")
        assert program.peak <= allowed
        found.append((program.schedule, program.peak / allowed))
        if program.schedule == "1f1b":
            assert program.peak == fused
    assert found[0][0] == "1f1b"
    assert found[-1][0] == "zb"
    assert max(part for schedule, part in found if schedule == "zb") > 0.95


@pytest.mark.parametrize("part", [1.0, 0.97, 0.93])
def test_activations_go_to_the_host_only_where_the_plan_does_not_fit_without(part: float) -> None:
    batch, plan = drawn_batch(0), Plan.parse("0:4@0 | 4:8@1 | 8:11@2 | 11:14@3")

    def limited(budget: float) -> Planner:
        return small_planner(
            4, config=small_model(6), budget=int(budget), schedule="1f1b", exact_memory=True,
            recompute=False, offload_optimizer=False,
        )  # fmt: skip

    loose = limited(80e9)
    assert loose.fitter is not None
    p = limited(part * max(loose.maker.keep(plan, batch).peaks) / (1.0 - MARGIN))
    assert p.fitter is not None
    finder = p.finder([batch])
    price = p.fitted(finder, finder.best_of(plan, None), None).price
    away = price.plan.o_plan.activations
    assert price.fits
    assert away
    allowed = p.fitter.maker.allowed
    for unit in away:
        fewer = replace(plan, o_plan=OPlan(activations=tuple(u for u in away if u != unit)))
        assert max(p.maker.keep(fewer, batch).peaks) > allowed


# -- a split backward where memory is short ----------------------------------------------------

PARTS = st.sampled_from([0.62, 0.7, 0.78, 0.86, 0.94, 1.02, 1.1])
SHORT = settings(max_examples=12, deadline=None)


def timed(budget: float, batch: Batch, schedule: str) -> tuple[Planner, Price, float]:
    """A layout's fit under a schedule, and what its program and the waits for the host take."""
    p = planner(budget, schedule=schedule)
    finder = p.finder([batch])
    price = p.fitted(finder, finder.best_of(LAYOUT, None)).price
    return p, price, p.maker.keep(price.plan, batch).seconds + price.swap


@SHORT
@given(seed=st.integers(0, 999), part=PARTS)
def test_auto_is_as_fast_as_the_better_of_both_backwards(seed: int, part: float) -> None:
    batch = drawn_batch(seed)
    budget = part * needed(batch)
    (_, split, halves), (_, fused, whole) = (timed(budget, batch, s) for s in ("zb", "1f1b"))
    p, price, seconds = timed(budget, batch, "auto")
    assert price.fits >= max(split.fits, fused.fits)
    if not price.fits:
        return
    made = p.maker.keep(price.plan, batch)
    assert made.peak <= p.maker.allowed
    assert price.device_bytes == tuple(map(max, made.memory))
    best = min([s for s, f in ((halves, split), (whole, fused)) if f.fits], default=math.inf)
    if price.missing > 0:  # where memory is not short the split one is not compared
        assert seconds <= best * (1 + 1e-9)


@SHORT
@given(seed=st.integers(0, 999), part=PARTS)
def test_a_split_backward_is_not_throttled_where_memory_optimisation_is_faster(
    seed: int, part: float
) -> None:
    batch = drawn_batch(seed)
    p, price, seconds = timed(part * needed(batch), batch, "zb")
    bare = p.maker.keep(LAYOUT, batch)
    if bare.peak <= p.maker.allowed:
        assert price.fits
    if price.fits and price.missing > 0 and bare.peak <= p.maker.allowed:
        assert seconds <= bare.seconds * (1 + 1e-9)


@SHORT
@given(seed=st.integers(0, 999), part=PARTS)
def test_what_was_decided_is_the_same_program_wherever_it_is_made(seed: int, part: float) -> None:
    batch = drawn_batch(seed)
    p, price, _ = timed(part * needed(batch), batch, "auto")
    made = p.maker.keep(price.plan, batch)
    plan = Plan.parse(str(p.decided(price.plan, batch, made.prediction)))
    assert plan.schedule == made.schedule
    again = planner(part * needed(batch), schedule="auto").maker.keep(plan, batch)
    assert again.program.instructions == made.program.instructions
    assert (again.seconds, again.memory) == (made.seconds, made.memory)


def test_optimizer_state_over_replicas_is_no_reason_for_a_fused_backward() -> None:
    batch = drawn_batch(1)
    p = small_planner(
        4, config=small_model(6), schedule="auto", exact_memory=True, shard_optimizer=True
    )
    finder = p.finder([batch])
    price = p.fitted(finder, finder.best_of(SHARDED, None)).price
    assert price.plan.o_plan.shard
    assert p.maker.keep(price.plan, batch).schedule == "zb"
    placed = place_plan(p.units, price.plan, batch)
    assert placed is not None
    assert placed.schedule == "zb"


@pytest.mark.parametrize("part", [2.0, 0.8])
def test_where_one_stage_holds_all_the_backward_is_fused(part: float) -> None:
    """Nothing waits there, so that halves of a backward could only cost."""
    whole, batch = Plan.parse("0:14@0,1"), drawn_batch(3)
    p = planner(schedule="auto")
    assert p.fitter is not None
    most = max(p.maker.keep(whole, batch).peaks) / (1.0 - MARGIN)
    p = planner(part * most, schedule="auto")
    found = p.fitted(p.finder([batch]), p.finder([batch]).best_of(whole, None))
    made = p.maker.keep(found.plan, batch)
    assert made.schedule == "1f1b"
    assert found.price.fits
    assert found.plan.o_plan.saves == (part < 1.0)
    split = p.maker.under(found.plan, batch, "zb")
    assert made.seconds <= split.seconds * (1.0 + 1e-9)
