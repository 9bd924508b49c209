"""One device planned for several: what it costs, and what comes back for all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flex.cluster.cluster import Link, description
from megatron_flex.data.cut import Cut
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.planner import service as service_module
from megatron_flex.planner import thin
from megatron_flex.planner.messages import Question, Setup
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.service import Service
from megatron_flex.planner.simulation import predict
from megatron_flex.planner.ways import batch_of
from tests.unit.planner.instances_real import (
    even_batch,
    small_cluster,
    small_model,
    small_planner,
)
from tests.unit.planner.test_simulation import any_plan

COST = CostCoefficients(1.0, 1e-4)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.sampled_from([2, 4, 8]),
    schedule=st.sampled_from(["zb", "1f1b"]),
    sharded=st.booleans(),
)
def test_a_device_costs_what_all_that_it_stands_for_do(
    seed: int, width: int, schedule: str, sharded: bool
) -> None:
    """Each of ``width`` pipelines has as many micro-batches: simulated, priced, in bytes."""
    r = np.random.default_rng(seed)
    full = small_planner(16, schedule=schedule, shard_optimizer=sharded)
    # Alike within a server and between servers: only where they are is in question, not order.
    cluster = replace(full.units.cluster, intra=Link(1e10, 1e-5), inter=Link(1e10, 1e-5))
    config, profile = full.units.config, full.units.profile
    full = Planner(config, profile, cluster, full.options)
    small = Planner(
        config, thin.thin_profile(profile, cluster, width), thin.thin_cluster(cluster, width),
        replace(full.options, width=width),
    )  # fmt: skip
    plan = any_plan(r, config.layers.num_units, 16 // width)
    if len(set(plan.degrees)) > 1:  # such replicas have parts of their own
        plan = Plan(tuple(replace(s, group=s.group[:1]) for s in plan.stages))
    count, tokens = int(r.integers(1, 9)), int(r.integers(1, 500))
    own, every = even_batch(count, tokens), even_batch(count * width, tokens)
    plan, wide = small.units.placed(plan), full.units.placed(thin.wide_plan(plan, width))
    one, all_ = predict(small.units, plan, own), predict(full.units, wide, every)
    assert one is not None
    assert all_ is not None
    assert one.seconds == pytest.approx(all_.seconds, rel=1e-9)
    assert np.repeat(one.device_bytes, width) == pytest.approx(all_.device_bytes, rel=1e-9)
    first = small.finder([own]).best_of(plan, None).price
    second = full.finder([every]).best_of(wide, None).price
    assert first.seconds == pytest.approx(second.seconds, rel=1e-9)
    assert np.repeat(first.device_bytes, width) == pytest.approx(second.device_bytes, rel=1e-9)


@given(seed=st.integers(0, 2**32 - 1), width=st.integers(1, 5))
def test_there_and_back(seed: int, width: int) -> None:
    plan = any_plan(np.random.default_rng(seed), 14, 6)
    wide = thin.wide_plan(plan, width)
    assert thin.thin_plan(wide, width) == plan
    assert wide.degrees == tuple(width * d for d in plan.degrees)


def test_what_does_not_hold_the_same_is_no_thin_plan() -> None:
    assert thin.thin_plan(Plan.parse("0:5@0-1 | 5:9@2-7"), 4) is None
    assert thin.thin_plan(Plan.parse("0:5@0,2 | 5:9@1,3"), 2) is None


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=60), width=st.integers(2, 9),
)  # fmt: skip
def test_a_part_has_its_share(lengths: list[int], width: int) -> None:
    own = thin.part(tuple(lengths), width, COST, 4)
    rest = list(lengths)
    for n in own:
        rest.remove(n)
    costs = [COST.of(n) for n in lengths]
    load = sum(COST.of(n) for n in own)
    assert load >= sum(costs) / width - max(costs)
    assert load <= sum(costs) / width + max(costs)
    assert max(own) == max(lengths) or load > sum(costs) / width


@pytest.mark.parametrize(
    ("devices", "degrees", "width"),
    [(64, (), 1), (128, (), 2), (128, (1,), 1), (256, (), 4), (1024, (), 16),
     (4096, (), 64), (160, (), 4), (160, (16, 24), 4),
     (1024, (8, 16), 1), (1024, (32, 96), 16)],
)  # fmt: skip
def test_widths(devices: int, degrees: tuple[int, ...], width: int) -> None:
    cluster = replace(small_cluster(4), servers=devices // 8, devices_per_server=8)
    assert thin.width_of(cluster, 128, degrees) == width


def test_a_run_on_many_devices_is_decided_for_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its decisions are for all devices, and simulated on them take what was predicted."""
    monkeypatch.setattr(thin, "MOST", 4)
    config, cluster = small_model(4), replace(small_cluster(16), servers=8, devices_per_server=4)
    options = PlannerOptions(schedule="zb", simulations=12, server_groups_above=16)
    static = "0:10@0-31"
    cut = Cut(by_cost=True, sliced=True, cost=COST)
    service = Service(Setup(config, description(cluster), None, options, cut, static))
    r = np.random.default_rng(3)
    batches = [tuple(map(int, r.integers(50, 2000, 160))) for _ in range(3)]
    running: str | None = None
    before: tuple[int, ...] = ()
    for number, lengths in enumerate(batches):
        question = Question(number, (lengths,), running, before)
        if number:
            soon = service.first(question)
            assert soon is None or soon.decision is not None
        decision = service.answer(question).decision
        assert decision is not None
        assert len(decision.predicted.device_bytes) == 32
        assert all(d % 8 == 0 for d in decision.plan.degrees)
        batch = batch_of(cut, lengths, decision.plan.cut)
        real = predict(service.planner.units, decision.plan, batch)
        assert real is not None
        assert decision.predicted.seconds == pytest.approx(real.seconds, rel=0.1)
        running, before = str(decision.plan), lengths
    # A plan of a run on other devices is decided from, too.
    odd = service.answer(Question(3, (batches[0],), "0:5@0-15 | 5:10@16-30", batches[0])).decision
    assert odd is not None
    assert service_module.thin_plan(Plan.parse("0:5@0-15 | 5:10@16-30"), 8) is None
