"""Tensor parallelism: what one of a group has, and what it costs."""

from __future__ import annotations

import pytest

from megatron_flex.cluster.cluster import load
from megatron_flex.data.cut import Cut
from megatron_flex.model.layers import Kind
from megatron_flex.model.tensor_cut import part_of
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.memory import total_parameters
from megatron_flex.planner.presets import model
from megatron_flex.simulator.batching import ByCut
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.static import Runner, Variant
from megatron_flex.simulator.tensor import TensorRunner, divides, profile_of

CONFIG, CLUSTER = model("gpt-3.35b"), load("a100x16")
SETTING = Setting(CONFIG, CLUSTER, closed_form_profile(CONFIG, CLUSTER))
VARIANT = Variant("1f1b", ByCut(Cut(1024, cost=SETTING.cost), "packed"))


def test_a_group_holds_the_model_once() -> None:
    part = part_of(CONFIG, 4)
    assert total_parameters(CONFIG) <= 4 * total_parameters(part) < 1.01 * total_parameters(CONFIG)
    assert divides(CONFIG, 4)
    assert not divides(CONFIG, 3)


def test_alone_it_is_the_same() -> None:
    lengths = (900, 300, 40, 2000, 512)
    one, plain = TensorRunner(SETTING, VARIANT, 1), Runner(SETTING, VARIANT)
    for plan in plain.planner.even_plans:
        own, other = (r.run(plan, lengths, None) for r in (one, plain))
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            assert own.seconds == pytest.approx(other.seconds)


def test_work_is_divided_and_collectives_come_on_top() -> None:
    whole = SETTING.profile
    found = profile_of(CONFIG, whole, CLUSTER, 4)
    link, sent = CLUSTER.intra, 0.75 * 2 * 4096  # 3/4 of a token's activation in bf16
    one = (3 * link.latency, sent / link.bytes_per_second)
    for kind, count in ((Kind.ATTENTION, 2), (Kind.HEAD, 1)):
        before, line = whole.kinds[kind].forward, found.kinds[kind].forward
        assert line.fixed == pytest.approx(before.fixed + count * one[0])
        assert line.per_token == pytest.approx(before.per_token / 4 + count * one[1])
        assert line.per_pair == pytest.approx(before.per_pair / 4)
        weight = whole.kinds[kind].backward_weight
        assert found.kinds[kind].backward_weight.per_token == pytest.approx(weight.per_token / 4)


def test_it_shortens_the_way_of_a_long_sample() -> None:
    seconds = []
    for degree in (1, 4):
        runner = TensorRunner(SETTING, VARIANT, degree)
        runs = [runner.run(plan, (8192,), None) for plan in runner.planner.even_plans]
        seconds.append(min(r.seconds for r in runs if r is not None))
    assert seconds[0] / 4 < seconds[1] < seconds[0] / 2
