"""Ranks that share each layer: their work, their bytes, and what sharing costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_flex.cluster.cluster import Link, load
from megatron_flex.cluster.profile import Profile, ProfileError
from megatron_flex.model.layers import Kind
from megatron_flex.planner.build import Batch
from megatron_flex.planner.closed_form import closed_form_profile, with_shared_layers
from megatron_flex.planner.footprint import Footprint
from megatron_flex.planner.memory import (
    boundary_bytes,
    chain_bytes,
    slab_elements,
    tied_state,
    unit_memory,
)
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.passes import passes, slice_passes
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.presets import model
from megatron_flex.planner.simulation import op_costs
from megatron_flex.planner.tensor import ALONE, TensorParallel, message_link, shared_profile
from tests.unit.planner.test_memory import CONFIGS

GPT, CLUSTER = model("gpt-3.35b"), load("a100x16")
TWO, SPLIT = TensorParallel(2), TensorParallel(2, sequence=True)
BATCH = Batch(np.array([900.0, 1024.0, 700.0]), np.array([4e5, 1e6, 3e5]))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_alone_is_what_it_always_was(name: str) -> None:
    config, alone = CONFIGS[name], TensorParallel(1, sequence=True)
    for function in (passes, slice_passes, unit_memory, slab_elements, tied_state, chain_bytes,
                     boundary_bytes):  # fmt: skip
        assert function(config, alone) == function(config)
    profile = closed_form_profile(config, CLUSTER)
    assert closed_form_profile(config, CLUSTER, alone) == profile
    assert shared_profile(profile, CLUSTER, alone) is profile


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_together_have_the_model_once(name: str) -> None:
    config = CONFIGS[name]
    whole, own = (sum(slab_elements(config, t)) for t in (ALONE, TWO))
    assert whole <= 2 * own
    # Norms, biases of sums, positions, and BERT's dense layers are on both.
    big = replace(config, ffn_hidden_size=4 * config.ffn_hidden_size)
    assert sum(slab_elements(big, TWO)) < 0.75 * sum(slab_elements(big))


def test_what_lies_between_products_is_divided_with_the_sequence_only() -> None:
    whole, shared, divided = (passes(GPT, t)[Kind.MLP] for t in (ALONE, TWO, SPLIT))
    hidden, ffn = 2.0 * GPT.hidden_size, 2.0 * GPT.ffn_hidden_size
    assert whole.kept - shared.kept == pytest.approx(ffn)  # half of two
    # The input of a product is kept as a shard, and gathered in the backward.
    assert shared.kept - divided.kept == pytest.approx(hidden / 2, rel=0.01)
    assert shared.owed == divided.owed
    assert boundary_bytes(GPT, TWO) == hidden
    assert boundary_bytes(GPT, SPLIT) == hidden / 2
    unit = unit_memory(GPT, SPLIT)[Kind.MLP]
    assert unit.activation == pytest.approx(hidden / 2 + divided.kept)
    assert unit.kept == hidden / 2
    assert chain_bytes(GPT, TWO).keys_values == chain_bytes(GPT).keys_values / 2


@pytest.mark.parametrize("tensor", [TWO, SPLIT])
def test_work_is_divided_and_sums_come_on_top(tensor: TensorParallel) -> None:
    whole, found = closed_form_profile(GPT, CLUSTER), closed_form_profile(GPT, CLUSTER, tensor)
    link, sent = CLUSTER.intra, 2.0 * GPT.hidden_size  # bytes of a token in bf16
    for kind in (Kind.ATTENTION, Kind.MLP):
        before, after = whole.kinds[kind], found.kinds[kind]
        wires = sent / link.bytes_per_second  # 2 (T - 1) / T of them
        own = after.forward.per_token - wires
        assert before.forward.per_token / 2 <= own * (1 + 1e-9)
        assert own < 0.6 * before.forward.per_token
        assert after.forward.fixed == pytest.approx(before.forward.fixed + 2 * link.latency)
        assert after.forward.per_pair == pytest.approx(before.forward.per_pair / 2)
        # No weight half waits for others.
        assert after.backward_weight.fixed == before.backward_weight.fixed
        assert after.backward_weight.per_token == before.backward_weight.per_token / 2
    between = found.kinds[Kind.ATTENTION].forward.per_token
    other = closed_form_profile(GPT, CLUSTER, SPLIT).kinds[Kind.ATTENTION].forward.per_token
    assert between > other or tensor == SPLIT


def test_a_measured_profile_is_of_its_own_size() -> None:
    whole = closed_form_profile(GPT, CLUSTER)
    two = with_shared_layers(GPT, whole, CLUSTER, TWO)
    assert (two.tensor, two.sequence) == (2, False)
    assert Profile.from_json(two.to_json()) == two
    assert with_shared_layers(GPT, two, CLUSTER, SPLIT) is two
    options = PlannerOptions(tensor_size=2)
    cluster = CLUSTER.grouped(2)
    with pytest.raises(ProfileError, match="no tensor parallelism, and this is tensor parallel"):
        Planner(GPT, whole, cluster, options)
    with pytest.raises(ProfileError, match="with sequence parallelism"):
        Planner(GPT, two, cluster, replace(options, sequence_parallel=True))
    assert Planner(GPT, two, cluster, options).decide([BATCH], None).plan.devices[-1] <= 7


def test_each_of_a_group_needs_less_memory() -> None:
    plan = Plan.parse(f"0:{GPT.layers.num_units}@0")
    held = [Footprint(GPT, tensor=t).held(plan, 0) for t in (ALONE, TWO, TensorParallel(4))]
    assert held[1] < 0.51 * held[0]
    assert held[2] < 0.26 * held[0]


def test_a_message_to_another_server_goes_in_shares_where_that_is_faster() -> None:
    slow, fast = Link(10e9, 1e-5), Link(100e9, 1e-6)
    four = TensorParallel(4)
    link = message_link(slow, fast, four)
    assert link.seconds(4e8) == pytest.approx(slow.seconds(1e8) + 3 * fast.seconds(1e8))
    assert message_link(fast, slow, four) == fast
    assert message_link(slow, fast, TensorParallel(4, sequence=True)) == slow
    assert message_link(slow, fast, ALONE) == slow


def test_the_simulation_prices_them_and_programs_say_so() -> None:
    plan = Plan.parse(f"0:11@0 | 11:22@1 | 22:{GPT.layers.num_units}@2")  # two on each server
    cluster = replace(CLUSTER.grouped(2), servers=2, devices_per_server=2)
    found = {}
    for tensor in (TWO, SPLIT):
        options = PlannerOptions(tensor_size=2, sequence_parallel=tensor.sequence)
        costs = Planner(GPT, closed_form_profile(GPT, cluster, tensor), cluster, options).units
        found[tensor] = op_costs(costs, plan, BATCH).transfer
        assert costs.divided == (0 if tensor.sequence else 2)
    size = boundary_bytes(GPT) * BATCH.tokens
    share = (cluster.inter.seconds(0) + size / 2 / cluster.inter.bytes_per_second) + (
        cluster.intra.seconds(0) + size / 2 / cluster.intra.bytes_per_second
    )
    assert found[TWO][1] == pytest.approx(share)
    assert found[TWO][0] == pytest.approx([cluster.intra.seconds(s) for s in size])
    assert found[SPLIT][1] == pytest.approx([cluster.inter.seconds(s / 2) for s in size])
