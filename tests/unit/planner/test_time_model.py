"""The closed-form time and its refinement against the simulated schedule."""

from __future__ import annotations

import pytest

from benchmarks.time_model import run, summary
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.static import static_plan
from megatron_flex.planner.wave import wave_seconds
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.list_scheduler import policy, simulate
from megatron_flex.schedule.policies.one_f_one_b import warm_up
from megatron_flex.schedule.routing import route
from tests.unit.planner.instances_real import drawn_batch, even_batch, small_planner

# (median, 90th percentile) of the refined estimate's relative error that must be kept, for
# spreads of 0, 0.4 and 0.8; docs/planner.md has the measured figures.
LIMITS = {
    ("straight", "fused", "even"): ((0.01, 0.02), (0.01, 0.04), (0.02, 0.06)),
    ("straight", "fused", "uneven"): ((0.015, 0.06), (0.06, 0.16), (0.08, 0.2)),
    ("straight", "split", "searched"): ((0.01, 0.07), (0.02, 0.06), (0.03, 0.12)),
    ("V", "split", "searched"): ((0.01, 0.05), (0.02, 0.05), (0.03, 0.12)),
}
SPREADS = (0.0, 0.4, 0.8)


def check(instances: int) -> None:
    rows = summary(run(instances, progress=False))
    for row in rows:
        key = (row["placement"], row["backward"], row["degrees"])
        median, p90 = LIMITS[key][SPREADS.index(row["spread"])]
        assert row["refined_median"] <= median, row
        assert row["refined_p90"] <= p90, row
    assert len(rows) == 12


def test_errors_stay_within_their_figures() -> None:
    check(180)


@pytest.mark.soak
def test_errors_stay_within_their_figures_on_many() -> None:
    check(6000)


def test_the_wave_of_equal_micro_batches_is_the_pipeline_formula() -> None:
    plan = Plan.parse("0:1@0 | 1:2@1 | 2:3@2 | 3:4@3")
    costs = OpCosts.uniform(4, 8)
    assert wave_seconds(costs, route(plan, costs), (4, 3, 2, 1), True) == (8 + 3) * 3.0


def test_the_waves_know_how_many_forwards_run_ahead() -> None:
    plan = Plan.parse("0:1@0 | 1:2@1 | 2:3@2 | 3:4@3")
    costs = OpCosts.uniform(4, 8)
    seconds = [wave_seconds(costs, route(plan, costs), (k, k, k, 1), True) for k in (1, 2, 4, 8)]
    # One in flight: each micro-batch goes there and back before the next.
    assert seconds[0] == 8 * 4 * 3.0
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("layout", ["0:2@0 | 2:10@1-4", "0:8@0-3 | 8:10@4", "0:4@0,1 | 4:10@2-4"])
def test_the_waves_are_the_schedule_of_equal_micro_batches_on_uneven_degrees(layout: str) -> None:
    plan = Plan.parse(layout)
    costs = OpCosts.scaled([s.stop - s.start for s in plan.stages], [1.0] * 24)
    placed = simulate(plan, costs, policy("1f1b"))
    wave = wave_seconds(costs, placed.problem.route, warm_up(placed.problem), False)
    assert wave == pytest.approx(placed.makespan, rel=0.02)


def test_the_waves_are_above_the_closed_form_where_sizes_differ() -> None:
    planner = small_planner(4, schedule="1f1b")
    plan = static_plan(planner.units.config, 4, 4)
    for batch, differ in ((even_batch(8, 512), False), (drawn_batch(1), True)):
        pricer = planner.finder([batch]).pricers[0]
        price = pricer.price(plan)
        assert (pricer.refined(price) > 1.02 * price.seconds) == differ
