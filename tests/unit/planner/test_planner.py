"""Decisions: what fits, what is kept, what is told."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.planner.decision import Action, Decision, Infeasible, action_of
from megatron_flex.planner.memory import total_parameters
from megatron_flex.planner.plan import OPlan, Plan
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.simulation import op_costs, predict, static_bytes
from megatron_flex.planner.static import static_plan
from megatron_flex.planner.trials import Switching
from megatron_flex.quantities import size
from tests.unit.planner.instances_real import (
    drawn_batch,
    even_batch,
    random_plan,
    small_model,
    small_planner,
)


@given(
    st.integers(1, 8),
    st.sampled_from([1.0e9, 1.6e9, 2.5e9, 6e9, 80e9]),
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from(["block", "layer"]),
)
def test_a_decision_fits_every_device_or_names_the_bytes_that_lack(
    devices: int, memory: float, seed: int, started: bool, unit: str
) -> None:
    if devices > 4:
        devices = 8  # whole servers
    planner = small_planner(devices, memory, unit=unit)
    batch = drawn_batch(seed)
    r = np.random.default_rng(seed)
    running = None
    if started:
        current = random_plan(r, planner.units.num_elements, devices)
        running = planner.running(current, drawn_batch(seed + 1))
    try:
        decision = planner.decide([batch], running)
    except Infeasible as error:
        assert error.shortfall > 0
        assert f"lacks {size(error.shortfall)}" in str(error)
        # So many bytes more are enough, by the searches' relaxation; one percent for whole units.
        more = small_planner(devices, (memory + error.shortfall) * 1.01, unit=unit)
        assert more.decide([batch], None).plan
        return
    plan = decision.plan
    plan.check(planner.units.num_elements, devices)
    assert max(decision.predicted.device_bytes) <= decision.budget == planner.units.budget
    if decision.predicted.device_bytes and unit == "layer" and decision.action != Action.KEEP:
        starts = {s.start for s in plan.stages if s.start > 1}
        assert running is not None or all(start % 2 for start in starts)
    assert math.isfinite(decision.predicted.total)
    assert Decision.from_json(decision.to_json()) == decision


def test_simulated_predictions_also_stay_within_the_budget() -> None:
    for seed in range(6):
        planner = small_planner(4, 2.2e9, simulations=3)
        decision = planner.decide([drawn_batch(seed)], None)
        assert decision.predicted.simulated
        assert max(decision.predicted.device_bytes) <= decision.budget * (1 + 1e-9)


def test_an_equal_plan_is_kept_and_a_small_gain_is_not_worth_a_switch() -> None:
    planner = small_planner(4)
    batch = drawn_batch(3)
    best = planner.decide([batch], None)
    again = planner.decide([batch], planner.running(best.plan, batch))
    assert again.action is Action.KEEP
    assert again.plan.stages == best.plan.stages
    eager = small_planner(4, margin=0.0)
    patient = small_planner(4, margin=0.9)
    poor = static_plan(planner.units.config, 2, 4)
    running = eager.running(poor, batch)
    assert eager.decide([batch], running).plan.stages != poor.stages
    kept = patient.decide([batch], running)
    assert kept.plan.stages == poor.stages
    assert next(r for r in kept.reasons if r.condition == "margin").holds is False


def test_a_switch_from_a_plan_whose_simulation_was_given_up_says_what_it_saves() -> None:
    planner = small_planner(4, simulations=4)
    batch = drawn_batch(3)
    best = planner.decide([batch], None).plan
    alone = Plan.parse(f"0:{planner.units.layers.num_units}@0")  # three devices idle
    finder, running = planner.finder([batch]), planner.running(alone, batch)
    found = [finder.best_of(plan, running) for plan in (best, alone)]
    # The one that is better is tried first, and the other given up.
    beyond, first = Switching(finder, running, 0.0), [Plan(best.stages)]
    decision, _ = planner.search(finder, found, running, Pool.empty(), 4, beyond, first)
    assert decision.plan.stages != alone.stages
    assert decision.current is None
    b = next(reason for reason in decision.reasons if reason.condition == "B")
    assert b.text.endswith("estimated from below")
    assert not b.holds


def test_a_batch_that_does_not_fit_makes_the_plan_grow_or_optimise() -> None:
    planner = small_planner(4, 3.0e9)
    short, long = even_batch(8, 256), even_batch(8, 4096)
    one_stage = static_plan(planner.units.config, 1, 4)
    running = planner.running(one_stage, short)
    decision = planner.decide([long], running)
    assert decision.action in (Action.GROW, Action.OPTIMISE)
    a = decision.reasons[0]
    assert (a.condition, a.holds) == ("A", False)
    assert a.left > a.right == planner.units.budget


def test_the_planner_chooses_among_micro_batchings() -> None:
    planner = small_planner(4)
    coarse, fine = even_batch(2, 4096), even_batch(8, 1024)
    decision = planner.decide([coarse, fine], None)
    assert decision.micro_batching == 1  # the longest one alone is four times shorter


@pytest.mark.parametrize(
    ("before", "after", "action"),
    [
        (None, "0:14@0", Action.START),
        ("0:14@0", "0:14@0", Action.KEEP),
        ("0:14@0", "0:14@0 ; recompute 1", Action.OPTIMISE),
        ("0:14@0", "0:7@0 | 7:14@1", Action.GROW),
        ("0:7@0 | 7:14@1", "0:14@0", Action.SHRINK),
        ("0:7@0 | 7:14@1", "0:8@0 | 8:14@1", Action.MIGRATE),
    ],
)
def test_actions(before: str | None, after: str, action: Action) -> None:
    current = None if before is None else Plan.parse(before)
    assert action_of(current, Plan.parse(after)) is action


@pytest.mark.parametrize("schedule", ["1f1b", "zb", "auto"])
def test_an_embedding_owes_the_gradient_of_its_output_between_the_halves(schedule: str) -> None:
    costs, batch = small_planner(2, schedule=schedule).units, even_batch(4, 512)
    units = costs.num_elements
    held = op_costs(costs, Plan.parse(f"0:1@0 | 1:{units}@1"), batch).activation
    assert held[0][0] == (0.0 if schedule == "1f1b" else 512 * costs.profile.boundary)
    whole = float(costs.activation[1:].sum())  # before the halves there is more
    assert held[1][0] == pytest.approx(512 * whole)


def test_recompute_costs_its_forward_again_and_keeps_its_input() -> None:
    planner = small_planner(2, schedule="1f1b")
    costs, batch = planner.units, even_batch(4, 512)
    plain = static_plan(costs.config, 2, 2)
    o = Plan(plain.stages, OPlan(recompute=(1, 2, 3)))
    a, b = op_costs(costs, plain, batch), op_costs(costs, o, batch)
    again = sum(costs.forward[:, u] @ [1, 512, 512**2] for u in (1, 2, 3))
    # They do not put off the weight half.
    weights = sum(costs.backward_weight[:, u] @ [1, 512, 512**2] for u in (1, 2, 3))
    assert b.backward_input[0][0] - a.backward_input[0][0] == pytest.approx(again + weights)
    assert a.backward_weight[0][0] - b.backward_weight[0][0] == pytest.approx(weights)
    dropped = sum(costs.activation[u] - costs.profile.boundary for u in (1, 2, 3))
    assert a.activation[0][0] - b.activation[0][0] == pytest.approx(512 * dropped)
    first, second = predict(costs, plain, batch), predict(costs, o, batch)
    assert first is not None
    assert second is not None
    assert second.seconds > first.seconds
    assert second.device_bytes[0] < first.device_bytes[0]


def test_static_bytes_count_the_tied_embedding_on_both_ends_and_once_on_one_device() -> None:
    planner = small_planner(2)
    costs, batch = planner.units, even_batch(1, 16)
    tied = planner.units.tied_state.total
    two = static_bytes(costs, static_plan(costs.config, 2, 2), batch)
    one = static_bytes(costs, Plan.parse("0:14@0"), batch)
    slack = 16 * costs.profile.boundary * 64
    assert sum(two) - sum(one) == pytest.approx(tied, abs=slack)


def test_static_bytes_count_the_exact_sums_of_every_parameter() -> None:
    plain, exact = (small_planner(1, bitwise=bitwise).units for bitwise in (False, True))
    plan, batch = Plan.parse(f"0:{plain.layers.num_units}@0"), even_batch(1, 16)
    more = static_bytes(exact, plan, batch)[0] - static_bytes(plain, plan, batch)[0]
    assert more == 8 * total_parameters(plain.config)


def test_the_best_static_plan_fits_every_batch() -> None:
    planner = small_planner(4, 3.0e9)
    batches = [[even_batch(8, 256)], [even_batch(8, 4096)]]
    plan = planner.best_static(batches)
    for ways in batches:
        assert planner.finder(ways).best_of(plan, None).price.fits
    other = static_plan(small_model(), 2, 4)
    total = [
        sum(planner.finder(w).best_of(p, None).price.seconds for w in batches)
        for p in (plan, other)
    ]
    assert total[0] <= total[1]
