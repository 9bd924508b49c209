"""Static plans: tuned over a sample, they are the best of what may be chosen, and they fit."""

from __future__ import annotations

from functools import cache

import pytest

from megatron_flex.cluster.cluster import load
from megatron_flex.data.cut import Cut
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import OPlan, PlanError
from megatron_flex.planner.presets import model
from megatron_flex.planner.simulation import predict
from megatron_flex.planner.ways import batch_of
from megatron_flex.simulator.batching import ByCut, ByDynaPipe
from megatron_flex.simulator.presets import STATIC
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.sources import Lengths, Mixture
from megatron_flex.simulator.static import Runner, Variant, tune


@cache
def setting(name: str = "gpt-3.35b", devices: int = 8, gigabytes: int = 78) -> Setting:
    config, cluster = model(name), load(f"a100x{devices}")
    base = PlannerOptions(budget=gigabytes * 10**9)
    return Setting(config, cluster, closed_form_profile(config, cluster), base)


def sample(longest: int = 2048) -> list[Lengths]:
    return [Mixture(12, longest=longest).batch(k) for k in range(3)]


def test_a_run_takes_what_the_planner_predicts() -> None:
    where = setting()
    runner = Runner(where, Variant("1f1b", ByCut(Cut(1024, cost=where.cost), "packed")))
    plan = runner.planner.even_plans[1]
    lengths = sample()[0]
    ran = runner.run(plan, lengths, None)
    assert ran is not None
    batch = batch_of(Cut(1024, cost=where.cost), lengths)
    expected = predict(runner.costs, ran.plan, batch)
    assert expected is not None
    assert (ran.seconds, ran.prediction.device_bytes) == (expected.seconds, expected.device_bytes)


@pytest.mark.parametrize("name", sorted(STATIC))
def test_tuning_finds_the_best_of_all(name: str) -> None:
    batches = sample()
    runners = STATIC[name].runners(setting(), batches)
    found = tune(runners, batches, batches[:1])
    others = []
    for runner in runners[:: max(1, len(runners) // 6)]:
        for plan in list(runner.plans([]))[:3]:
            prices = [runner.price(plan, lengths) for lengths in batches]
            ran = [runner.run(plan, lengths, None) for lengths in batches]
            if all(r is not None for r in ran) and not any(o for _, o in prices):
                others.append(sum(r.seconds for r in ran if r is not None) / len(batches))
    assert others
    assert found.seconds <= min(others) * (1 + 1e-9)
    mean = sum(found.run(lengths).seconds for lengths in batches) / len(batches)
    assert mean == pytest.approx(found.seconds)


def test_recompute_is_settled_for_the_batch_that_needs_most() -> None:
    where = setting(gigabytes=15)
    batches = [(300,) * 12, (2048,) * 12]
    runners = [Runner(where, Variant("1f1b", ByCut(Cut(4096, cost=where.cost), "packed")))]
    small = tune(runners, batches[:1], [])
    both = tune(runners, batches[:1], batches[1:])
    assert both.settled is not None
    assert both.settled.recompute
    assert small.settled == OPlan()
    assert both.run(batches[1]).rescued is False
    rescued = small.run(batches[1]) if both.plan == small.plan else None
    assert rescued is None or rescued.rescued
    assert both.run(batches[0]).plan.o_plan.recompute == both.settled.recompute
    for lengths in batches:
        assert max(both.run(lengths).prediction.device_bytes) <= 15e9


def test_what_fits_nowhere_is_said() -> None:
    where = setting(gigabytes=3)
    runners = STATIC["packed-1f1b"].runners(where, sample())
    with pytest.raises(PlanError, match="no even layout fits all batches"):
        tune(runners, sample(), [])


def test_dynapipe_cuts_smaller_where_memory_is_short() -> None:
    rule, lengths = ByDynaPipe(), (2048,) * 8 + (100,) * 40
    largest = []
    for gigabytes in (15, 78):
        runner = Runner(setting(gigabytes=gigabytes), Variant("1f1b", rule, adaptive=True))
        plan = runner.planner.even_plans[-1]
        largest.append(max(b.tokens.max() for b in rule.ways(lengths, plan, runner.costs)[:1]))
        ran = runner.run(plan, lengths, None)
        assert ran is not None
        assert max(ran.prediction.device_bytes) <= gigabytes * 1e9
    assert largest[0] <= largest[1]
