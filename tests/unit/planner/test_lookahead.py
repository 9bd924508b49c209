"""Look-ahead against the static plan and HBSA, on the same costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from megatron_flex.planner.beyond import Amortised
from megatron_flex.planner.build import Batch
from megatron_flex.planner.candidates import Finder
from megatron_flex.planner.decision import Infeasible
from megatron_flex.planner.edges import Edges
from megatron_flex.planner.hbsa import Hbsa
from megatron_flex.planner.lookahead import Lookahead, Path
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.simulation import predict
from megatron_flex.planner.switching import Running
from tests.unit.planner.instances_real import drawn_batch, even_batch, random_plan, small_planner

WINDOW = 4


def sequence(seed: int, length: int) -> list[list[Batch]]:
    """Batches of the length mixture; every third or so has one much longer sample."""
    r = np.random.default_rng(seed)
    batches = []
    for i in range(length):
        batch = drawn_batch(1000 * seed + i, samples=16)
        if r.random() < 0.3:
            long = float(r.integers(3000, 9000))
            batch = Batch(np.append(batch.tokens, long), np.append(batch.squares, long**2))
        batches.append([batch])
    return batches


def path_of(
    lookahead: Lookahead,
    finders: Sequence[Finder],
    running: Running | None,
    plans: Sequence[Plan],
) -> Path:
    """The price of given plans, by the same costs; infinite if one does not fit."""
    found = [f.best_of(plan, None) for f, plan in zip(finders, plans, strict=True)]
    iterations = sum(c.price.seconds for c in found)
    if not math.isfinite(iterations):
        return Path(tuple(found), iterations, 0.0, 0.0)
    switches = 0.0 if running is None else lookahead.edge(running, found[0].plan)
    for one, other in pairwise(found):
        switches += lookahead.edge(lookahead.running_of(one), other.plan)
    terminal = lookahead.edge(lookahead.running_of(found[-1]), lookahead.static)
    return Path(tuple(found), iterations, switches, terminal)


def check_sequence(seed: int, length: int = 8) -> None:
    """One rolling run: never above static in all, never above HBSA in a window."""
    memory = (2.4e9, 3e9, 80e9)[seed % 3]
    batches = sequence(seed, length)
    while True:
        # So much memory that there is a static plan to compare with, and often no more.
        planner = small_planner((4, 8)[seed % 2], memory)
        try:
            static = planner.best_static(batches)
            break
        except (Infeasible, PlanError):
            memory *= 1.3
    hbsa = Hbsa(small_planner((4, 8)[seed % 2], memory, planner="hbsa"))
    lookahead = Lookahead(planner, static, hbsa)
    finders = [planner.finder(ways) for ways in batches]
    running = None
    iterations = switches = 0.0
    for number in range(length):
        window = finders[number : number + WINDOW]
        path = lookahead.best_path(window, running)
        assert path is not None
        for plans in ([static] * len(window), lookahead.hbsa_plans(window, running)):
            if len(plans) == len(window):
                rival = path_of(lookahead, window, running, plans)
                assert path.seconds <= rival.seconds * (1 + 1e-9), (seed, number)
        first = path.plans[0]
        iterations += first.price.seconds
        if running is not None:
            switches += path_of(lookahead, window[:1], running, [first.plan]).switches
        assert max(first.price.device_bytes) <= planner.units.budget * (1 + 1e-12)
        running = lookahead.running_of(first)
    fixed = sum(f.best_of(static, None).price.seconds for f in finders)
    back = path_of(lookahead, finders[-1:], None, [first.plan]).terminal
    assert iterations + switches + back <= fixed * (1 + 1e-9), seed


@pytest.mark.parametrize("seed", range(6))
def test_never_above_the_static_plan_nor_hbsa(seed: int) -> None:
    check_sequence(seed)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_never_above_the_static_plan_nor_hbsa_in_many_sequences(block: int) -> None:
    for seed in range(6 + 10 * block, 16 + 10 * block):
        check_sequence(seed, 12)


def test_it_waits_for_a_long_batch_instead_of_switching_twice() -> None:
    planner = small_planner(4, 3e9)
    short, long = [even_batch(16, 256)], [even_batch(4, 6000)]
    window = [short, long, short, long]
    static = planner.best_static(window)
    lookahead = Lookahead(planner, static)
    finders = [planner.finder(ways) for ways in window]
    path = lookahead.best_path(finders, None)
    assert path is not None
    assert all(math.isfinite(c.price.seconds) for c in path.plans)
    greedy = [planner.decide(ways, None).plan for ways in window]
    assert path.seconds <= path_of(lookahead, finders, None, greedy).seconds * (1 + 1e-9)


def test_the_price_of_a_path_adds_up() -> None:
    planner = small_planner(4)
    r = np.random.default_rng(1)
    plans = [random_plan(r, planner.units.num_elements, 4) for _ in range(3)]
    finders = [planner.finder([drawn_batch(i)]) for i in range(3)]
    lookahead = Lookahead(planner, plans[0])
    path = path_of(lookahead, finders, None, plans)
    assert path.iterations == pytest.approx(sum(c.price.seconds for c in path.plans))
    assert path.seconds == path.iterations + path.switches + path.terminal
    same = path_of(lookahead, finders, None, [plans[0]] * 3)
    assert (same.switches, same.terminal) == (0.0, 0.0)


def test_the_decision_is_the_first_plan_of_the_path() -> None:
    planner: Planner = small_planner(4)
    batches = sequence(5, 3)
    static = planner.best_static(batches)
    lookahead = Lookahead(planner, static)
    path = lookahead.best_path([planner.finder(ways) for ways in batches], None)
    decision = lookahead.decide_with(Pool.empty(), batches, None)[0]
    assert path is not None
    assert decision.plan.stages == path.plans[0].plan.stages
    finders = [planner.finder(ways) for ways in batches]
    again = path_of(lookahead, finders, None, [c.plan for c in path.plans])
    assert path.switches == pytest.approx(again.switches)
    assert path.seconds == pytest.approx(again.seconds)
    running = planner.running(static, batches[0][0])
    assert lookahead.decide_with(Pool.empty(), batches[1:], running)[0].current is not None


def test_a_later_batch_that_fits_no_plan_ends_the_window_before_it() -> None:
    planner = small_planner(4, 3e9)
    short, never = [even_batch(16, 256)], [even_batch(2, 10**6)]
    lookahead = Lookahead(planner, planner.best_static([short]))
    alone = lookahead.best_path([planner.finder(short)], None)
    path = lookahead.best_path([planner.finder(ways) for ways in (short, never)], None)
    assert alone is not None
    assert path is not None
    assert len(path.plans) == 1
    assert path.seconds == alone.seconds


def test_a_first_batch_that_fits_no_plan_is_refused() -> None:
    planner = small_planner(2, 1e9)
    lookahead = Lookahead(planner, Plan.parse("0:14@0,1"))
    with pytest.raises(Infeasible, match="lacks"):
        lookahead.decide_with(Pool.empty(), [[even_batch(2, 60000)]], None)


def test_each_switch_of_a_path_costs_the_margin_besides() -> None:
    free, dear = (small_planner(4, margin=margin) for margin in (0.0, 0.03))
    plans = [Plan.parse(text) for text in ("0:14@0-3", "0:7@0,1 | 7:14@2,3")]
    order = [plans[0], plans[1], plans[1], plans[0], plans[1]]  # three switches, and one back
    batches = [[drawn_batch(i)] for i in range(len(order))]
    paths = []
    for planner in (free, dear):
        lookahead = Lookahead(planner, plans[0])
        paths.append(path_of(lookahead, [planner.finder(ways) for ways in batches], None, order))
    before = [c.price.seconds for c in paths[0].plans]
    assert [c.price.seconds for c in paths[1].plans] == before
    # Of the iteration that each switch follows.
    more = 0.03 * (before[0] + before[2] + before[3])
    assert paths[1].switches - paths[0].switches == pytest.approx(more)
    assert paths[1].terminal - paths[0].terminal == pytest.approx(0.03 * before[4])


@pytest.mark.parametrize("schedule", ["zb", "1f1b"])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_never_above_the_static_plan_in_simulated_time(schedule: str, window: int) -> None:
    """Iterations by their simulation and all switches, but for one.

    ``window`` 0: first answers, once there are any.
    """
    for seed in range(2):
        planner = small_planner(4, schedule=schedule, simulations=25)
        batches = sequence(seed, 5)
        # Not the best one, so that leaving it is worth something.
        static = planner.even_plans[seed]
        lookahead = Lookahead(planner, static)
        pool, running, total, fixed, switch = Pool.empty(), None, 0.0, 0.0, 0.0
        for number, ways in enumerate(batches):
            found = lookahead.first(planner.finder(ways), running, pool) if window == 0 else None
            assert window > 0 or number == 0 or found is not None
            decision, pool = found or lookahead.decide_with(
                pool, batches[number:][: max(1, window)], running
            )
            total += decision.predicted.total
            batch = ways[decision.micro_batching]
            running = planner.running(decision.plan, batch)
            alone = predict(
                planner.units, planner.finder(ways).pricers[0].price(static).plan, batch
            )
            assert alone is not None
            fixed += alone.seconds
            away = planner.running(static, batch)
            switch = max(switch, lookahead.edge(away, decision.plan))
            assert total <= (fixed + switch) * (1 + 1e-9)
            assert pool.credit == pytest.approx(fixed - total)


@pytest.mark.parametrize("seed", [1, 2, 6])
def test_a_run_begins_on_a_plan_that_is_no_slower_to_stay_on_than_the_static_one(seed: int) -> None:
    """In simulated time, over the window; by the closed form others would seem faster."""
    planner = small_planner(4, schedule="zb", simulations=25)
    batches = sequence(seed, WINDOW)
    static = planner.best_static(batches)

    def stays(plan: Plan) -> float:
        total = 0.0
        for ways in batches:
            found = predict(planner.units, planner.finder(ways).pricers[0].price(plan).plan, *ways)
            assert found is not None
            total += found.seconds
        return total

    decision, _ = Lookahead(planner, static).decide_with(Pool.empty(), batches, None)
    assert stays(Plan(decision.plan.stages)) <= stays(static) * (1 + 1e-9)


def test_a_plan_that_is_better_time_after_time_is_switched_to_in_the_end() -> None:
    """Though no window shows that the switch pays; not for one batch."""
    planner = small_planner(4, schedule="zb", simulations=15, margin=0.9)
    static, batch = Plan.parse("0:7@0,1 | 7:14@2,3"), [drawn_batch(3)]
    best = planner.decide(batch, None)
    slow = predict(planner.units, planner.units.placed(static), batch[0])
    assert slow is not None
    gain = slow.seconds - best.predicted.seconds
    running = planner.running(static, batch[0])
    lookahead = Lookahead(planner, static)
    switch = lookahead.edge(running, best.plan)
    assert 0.0 < 3 * gain < switch, "else a window is enough"
    pool, plans = Pool.empty(), [static.stages]
    for _ in range(math.ceil(2 * switch / gain)):
        decision, pool = lookahead.decide_with(pool, [batch] * 2, running)
        running = planner.running(decision.plan, batch[0])
        plans.append(decision.plan.stages)
    assert plans[1] == plans[2] == static.stages
    assert plans[-1] != static.stages
    assert sum(one != other for one, other in pairwise(plans)) == 1


def test_a_run_without_credit_goes_back_to_its_static_plan() -> None:
    planner = small_planner(4, 3e9, schedule="zb", simulations=15)
    static, batch = Plan.parse("0:7@0,1 | 7:14@2,3"), [drawn_batch(3)]
    finder = planner.finder(batch)
    other = planner.decide(batch, None).plan
    running = planner.running(other, batch[0])
    own, away = (finder.best_of(p, running) for p in (static, other))
    switch = Edges(planner, static).switch(planner.running(static, batch[0]), other)
    assert switch > 0.0, "else state has room to join early"
    for credit, allowed in ((1.0, True), (-0.9 * switch, True), (-1.1 * switch, False)):
        rule = Amortised(Edges(planner, static), running, Pool({}, credit=credit))
        assert rule.allows(own, 1.0)
        assert rule.allows(away, 1.0) == allowed


def test_no_run_goes_back_where_that_costs_more_than_it_is_behind() -> None:
    """On a full device state cannot join early; under the static plan there was room."""
    planner = small_planner(4, schedule="zb", simulations=15)
    static, batch = Plan.parse("0:7@0,1 | 7:14@2,3"), [drawn_batch(3)]
    finder = planner.finder(batch)
    other = planner.decide(batch, None).plan
    running = replace(planner.running(other, batch[0]), spare=(0.0,) * 4)
    own, away = (finder.best_of(p, running) for p in (static, other))
    edges = Edges(planner, static)
    back = edges.switch(running, static)
    assert back > edges.switch(planner.running(static, batch[0]), other)
    for credit, allowed in ((-0.9 * back, True), (-1.1 * back, False)):
        rule = Amortised(edges, running, Pool({}, credit=credit))
        assert rule.allows(own, 1.0)
        assert rule.allows(away, 1.0) == allowed
