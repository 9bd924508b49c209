"""Decisions by simulation: repeated exactly, never worse with more, never worse than the pool."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flex.planner.anytime import SLACK, Entry, Found, Trial, search
from megatron_flex.planner.build import Batch
from megatron_flex.planner.moves import Layout, neighbours
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.pool import SIZE, USEFUL, WORST, Pool
from megatron_flex.planner.simulation import predict
from tests.unit.planner.instances_real import drawn_batch, small_model, small_planner
from tests.unit.planner.test_simulation import any_plan

UNITS = small_model().layers.num_units
POINTS = tuple(range(UNITS + 1))


def numbered(n: int) -> Entry:
    """An entry for each number."""
    return Plan.parse(f"0:{n + 1}@0"), 0


def made_up(
    scores: list[float], near: list[list[int]], starts: list[int], count: int
) -> Found[int]:
    """A search among numbered entries with given scores and moves."""
    known = {numbered(n): n for n in range(len(scores))}
    asked: list[Entry] = []

    def evaluate(entry: Entry, stop: float) -> Trial[int] | None:
        assert entry not in asked
        asked.append(entry)
        n = known[entry]
        return Trial(entry, scores[n], n) if scores[n] < stop else None

    found = search(
        evaluate,
        [numbered(n) for n in starts],
        lambda trial: [numbered(n) for n in near[trial.detail]],
        count,
    )
    assert found.simulations == len(asked) <= count
    return found


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 60), more=st.integers(0, 40))
def test_a_search(seed: int, count: int, more: int) -> None:
    """More is never worse, what was tried first stays first, and its own count repeats it."""
    r = np.random.default_rng(seed)
    size = int(r.integers(1, 80))
    scores = [float(s) for s in r.uniform(1.0, 1.0 + 5 * SLACK, size)]
    near = [list(map(int, r.integers(0, size, int(r.integers(0, 6))))) for _ in range(size)]
    starts = list(map(int, r.integers(0, size, int(r.integers(1, 30)))))
    one = made_up(scores, near, starts, count)
    longer = made_up(scores, near, starts, count + more)
    assert longer.trials[0].score <= one.trials[0].score
    assert list(longer.scores)[: one.simulations] == list(one.scores)
    assert made_up(scores, near, starts, one.simulations) == one
    # The best of what was tried is never given up.
    assert one.trials[0].score == min(scores[t.detail] for t in one.trials)
    tried = [numbered(n) for n in starts if numbered(n) in one.scores]
    assert all(one.trials[0].score <= scores[e[0].num_units - 1] for e in tried)


def test_moves_start_from_the_best_and_go_on_from_the_next() -> None:
    """A chain of ever better entries is followed to its end, then the worse start's."""
    scores = [10.0, 9.0, 8.0, 7.0, 11.0, 7.05]
    near = [[1], [2], [3], [], [5], []]
    found = made_up(scores, near, [4, 0], 6)
    assert [e[0].num_units - 1 for e in found.scores] == [4, 0, 1, 2, 3, 5]
    assert [t.detail for t in found.trials] == [3, 5, 2, 1, 0, 4]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_neighbours_are_plans_of_the_same_units_and_devices(seed: int) -> None:
    """Also from Vs, and from Vs in which a group is passed once only."""
    r = np.random.default_rng(seed)
    plan = any_plan(r, UNITS, 6)
    layout = Layout.of(plan, POINTS)
    if layout is None:
        groups = [s.group for s in plan.stages]
        assert len(set(groups)) < len(groups)
        return
    assert layout.plan(POINTS) == plan
    work = [float(w) for w in r.uniform(0.5, 2.0, UNITS)]
    busy = [float(b) for b in r.uniform(0.5, 2.0, 6)]
    straight_only = bool(r.integers(2)) and not layout.v
    for near in neighbours(layout, busy.__getitem__, work, straight=True, v=not straight_only):
        found = near.plan(POINTS)
        found.check(UNITS, 6)
        assert near != layout
        assert found.devices == plan.devices
        assert not (straight_only and near.v)
        again = Layout.of(found, POINTS)
        assert again is not None
        assert again.plan(POINTS) == found


def test_a_fold_and_back_keeps_the_work_of_each_group() -> None:
    """Equal elements: a straight plan folded to a V has as many on every group."""
    plan = Plan.parse("0:4@0,1 | 4:8@2,3 | 8:14@4,5")
    layout = Layout.of(plan, POINTS)
    assert layout is not None
    folded = layout.folded([1.0] * UNITS)
    assert folded is not None
    assert folded.v
    assert [a + b for a, b in zip(folded.first, folded.back, strict=True)] == [4, 4, 6]
    assert folded.folded([1.0] * UNITS) == layout


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_pool_is_bounded_and_keeps_what_was_useful_lately(seed: int) -> None:
    """What was within reach of the best lately stays; order and contents follow from values."""
    r = np.random.default_rng(seed)
    pools = [Pool.empty(), Pool.empty()]
    last: dict[Entry, int] = {}
    for batch in range(1, 12):
        some = r.permutation(60)[: int(r.integers(1, 40))]
        times = {numbered(int(n)): float(r.uniform(1.0, 1.05)) for n in some}
        best = min(times.values())
        last |= {e: batch for e, t in times.items() if t / best - 1 <= USEFUL}
        shuffled = dict(sorted(times.items(), key=lambda _: r.random()))
        pools = [pools[0].after(times), pools[1].after(shuffled)]
        assert len(pools[0].entries) <= SIZE
        assert pools[0].entries == pools[1].entries
        dropped = [last[e] for e in last if e not in pools[0].records]
        kept = [last[e] for e in pools[0].records]
        assert max(dropped, default=0) <= min(kept)
        last = {e: n for e, n in last.items() if e in pools[0].records}


def test_what_was_given_up_is_no_better_than_was_known() -> None:
    good, bad, slow = (numbered(n) for n in range(3))
    pool = Pool.empty().after({good: 1.0, bad: 1.005})
    found = pool.after({good: 1.0}, {bad: 1.0, slow: 1.0})
    assert set(found.records) == {good, bad}
    assert found.records[bad] == pool.records[bad]
    assert found.records[good].useful == 2
    unfit = pool.after({good: 1.0}, {bad: math.inf})
    assert unfit.records[bad].loss == pytest.approx(0.8 * 0.005 + 0.2 * WORST)
    assert unfit.records[bad].useful == 1


def test_nothing_that_was_given_up_begins_the_next_decision() -> None:
    planner = small_planner(4, schedule="zb", simulations=12)
    pool = Pool.empty()
    for ways in the_batches(1, 3):
        finder = planner.finder(ways)
        _, pool = planner.decide_with(pool, ways, None)
        own = {
            (plan, way): predict(planner.units, plan, finder.pricers[way].batch)
            for (plan, way), record in pool.records.items()
            if record.useful == pool.batches
        }
        seconds = [p.seconds for p in own.values() if p is not None]
        assert len(seconds) == len(own)
        assert max(seconds) <= min(seconds) * (1 + 2 * USEFUL)


def the_batches(seed: int, number: int) -> list[list[Batch]]:
    """Batches, each cut in two ways."""
    return [
        [drawn_batch(100 * seed + i, 16, budget) for budget in (1024, 2048)] for i in range(number)
    ]


def rolled(planner: Planner, batches: list[list[Batch]], counts: list[int | None]) -> list[str]:
    """Decisions one after the other, with the pool that the earlier ones leave."""
    pool, running, found = Pool.empty(), None, []
    for ways, count in zip(batches, counts, strict=True):
        decision, pool = planner.decide_with(pool, ways, running, count=count)
        running = planner.running(decision.plan, ways[decision.micro_batching])
        found.append(decision.to_json())
    return found


@pytest.mark.parametrize("schedule", ["zb", "1f1b", "auto"])
@pytest.mark.parametrize("seed", range(2))
def test_decisions(schedule: str, seed: int) -> None:
    """Equal input gives equal decisions; the recorded count repeats them; more is never worse."""
    batches = the_batches(seed, 2)
    options: dict[str, Any] = {"schedule": schedule, "exact_memory": schedule == "auto"}
    planner = small_planner(4, 3e9, simulations=40, **options)
    found = rolled(planner, batches, [None] * 2)
    assert rolled(small_planner(4, 3e9, simulations=40, **options), batches, [None] * 2) == found
    counts: list[int | None] = []
    pool, running = Pool.empty(), None
    for ways in batches:
        decision, after = planner.decide_with(pool, ways, running)
        assert 1 <= decision.simulations <= 40
        counts.append(decision.simulations)
        times = [
            planner.decide_with(pool, ways, running, count=count)[0].predicted.total
            for count in (2, 15, 40)
        ]
        # A switch must be worth a margin, so what counts falls, and so does the time.
        assert times == sorted(times, reverse=True)
        assert decision.predicted.simulated
        pool = after
        running = planner.running(decision.plan, ways[decision.micro_batching])
    other = small_planner(4, 3e9, simulations=7, **options)
    assert rolled(other, batches, counts) == found


@pytest.mark.parametrize("split", [True, False])
def test_never_worse_than_anything_in_the_pool_nor_a_start(split: bool) -> None:
    """By simulated time, each plan of the pool cut in its way."""
    planner = small_planner(4, schedule="zb" if split else "1f1b", simulations=120)
    pool = Pool.empty()
    for ways in the_batches(7, 4):
        before = pool
        decision, pool = planner.decide_with(before, ways, None)
        finder = planner.finder(ways)
        for plan, way in before.entries:
            price = finder.pricers[way].price(plan)
            alone = predict(planner.units, price.plan, ways[way])
            assert alone is not None
            assert decision.predicted.seconds <= alone.seconds * (1 + 1e-12)
        assert math.isfinite(decision.predicted.seconds)
    assert len(pool.entries) > 1


def test_a_search_finds_better_cuts_than_the_closed_form() -> None:
    """Whole layers, few devices: what the searches find is coarse."""
    config = small_model(5)
    batch = drawn_batch(3, samples=64)
    planner = small_planner(4, config=config, unit="layer", schedule="zb", simulations=100)
    few = replace(planner.options, simulations=1)
    short = Planner(config, planner.units.profile, planner.units.cluster, few)
    long, one = planner.decide([batch], None), short.decide([batch], None)
    assert long.predicted.seconds < one.predicted.seconds
    starts = {s.start for s in long.plan.stages if s.start > 1}
    assert all(start % 2 for start in starts)  # between layers
