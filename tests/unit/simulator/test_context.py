"""Context parallelism: what a group of devices shares, and what its ring costs."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_flex.cluster.cluster import ClusterError, load
from megatron_flex.data.cut import Cut
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.plan import OPlan, Plan, Stage
from megatron_flex.planner.presets import model
from megatron_flex.planner.simulation import op_costs
from megatron_flex.planner.ways import micro_batches
from megatron_flex.simulator.context import ContextRunner, Ring, Shared, shared
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.static import Variant

LENGTHS = (4096, 700, 333, 60)


def _runner(degree: int) -> ContextRunner:
    config, cluster = model("gpt-3.35b"), load("a100x16")
    setting = Setting(config, cluster, closed_form_profile(config, cluster))
    rule = Shared(Cut(1024, cost=setting.cost), degree)
    return ContextRunner(setting, Variant("1f1b", rule), degree)


def test_devices_of_a_server_become_one() -> None:
    cluster = load("a100x16").grouped(2)
    assert (cluster.world_size, cluster.devices_per_server, cluster.servers) == (8, 2, 4)
    with pytest.raises(ClusterError, match="of 3 devices do not divide a server's 4"):
        load("a100x16").grouped(3)


def test_each_device_has_its_part_of_every_sample() -> None:
    parts = micro_batches(Cut(8192), LENGTHS)
    assert len(parts) == 1
    alone, half = shared(parts, 1), shared(parts, 2)
    assert list(alone.tokens) == [4096 + 700 + 334 + 60]  # in pairs
    assert list(half.tokens) == [(4096 + 700 + 336 + 60) / 2]
    assert list(half.squares) == [(4096**2 + 700**2 + 336**2 + 60**2) / 2]


def test_one_device_alone_has_no_ring() -> None:
    costs = _runner(1).costs
    plan = Plan((Stage(0, 17, (0, 1)), Stage(17, 34, (2, 3))))
    batch = shared(micro_batches(Cut(1024), LENGTHS), 1)
    assert Ring(costs, 1).op_costs(plan, batch) == op_costs(costs, plan, batch)


def test_attention_hides_the_ring_where_it_takes_longer() -> None:
    costs = _runner(2).costs
    plan = Plan((Stage(0, 17, (0, 1)), Stage(17, 34, (2, 3))))
    ring = Ring(costs, 2)
    fixed, rate = costs.cluster.device.attention.line()
    for lengths in ((65536,), (64,) * 64):
        batch = shared(micro_batches(Cut(65536), lengths), 2)
        own, plain = ring.op_costs(plan, batch), op_costs(costs, plan, batch)
        added = own.forward - plain.forward
        bytes_ = batch.tokens * 2 * 4096 * 2  # keys and values in bf16
        wire = costs.intra.latency + bytes_ / costs.intra.bytes_per_second
        hides = 0.5 * 2.0 * 4096 * batch.squares * rate  # half of the pairs' work
        wait = np.maximum(0.0, wire - hides)
        assert added[0] == pytest.approx(8 * (wait + fixed), rel=1e-6)  # 8 layers
        assert (wait > 0.0) == (len(lengths) > 1)
        back = own.backward_input - plain.backward_input
        assert back == pytest.approx(2 * added)


def test_recompute_goes_round_again_and_sums_are_over_all_devices() -> None:
    costs = _runner(2).costs
    plan = Plan((Stage(0, 17, (0, 1)), Stage(17, 34, (2,))))
    batch = shared(micro_batches(Cut(1024), LENGTHS), 2)
    ring = Ring(costs, 2)
    again = Plan(plan.stages, OPlan(recompute=(1,)))
    first = ring.op_costs(again, batch).backward_input[0]
    without = op_costs(costs, again, batch).backward_input[0]
    one = ring.op_costs(plan, batch).forward - op_costs(costs, plan, batch).forward
    assert first - without == pytest.approx(one[0] / 8 * 17)
    own, plain = ring.op_costs(plan, batch), op_costs(costs, plan, batch)
    size, link = costs.slab_gradients[3], costs.intra
    assert own.reduce[3] == pytest.approx(6 * (link.latency + size / 4 / link.bytes_per_second))
    assert own.update[3] == plain.update[3]
    assert own.update[20] == pytest.approx(plain.update[20] + own.reduce[20])


def test_it_is_the_faster_the_longer_samples_are() -> None:
    plans = {c: _runner(c) for c in (1, 4)}
    ratio = []
    for lengths in ((300,) * 64, (30000,) * 4):
        seconds = []
        for runner in plans.values():
            best = [runner.run(p, lengths, None) for p in runner.plans([])]
            seconds.append(min(r.seconds for r in best if r is not None))
        ratio.append(seconds[1] / seconds[0])
    assert ratio[1] < 0.6 < ratio[0]
