"""Static plans from Megatron's flags."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.planner.flops import iteration_flops, model_work, total_work
from megatron_flex.planner.memory import total_parameters
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.presets import MODELS
from megatron_flex.planner.static import bottleneck_cuts, layout_cuts, static_plan
from tests.unit.planner.instances_real import small_model


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_cuts_have_the_least_bottleneck(costs: list[int], stages: int) -> None:
    if stages > len(costs):
        with pytest.raises(PlanError):
            bottleneck_cuts(costs, stages)
        return
    cuts = bottleneck_cuts(costs, stages)
    runs = [sum(costs[a:b]) for a, b in pairwise(cuts)]
    assert cuts[0] == 0
    assert cuts[-1] == len(costs)
    assert len(runs) == stages
    assert all(b > a for a, b in pairwise(cuts))
    inner = range(1, len(costs))
    best = min(
        max(sum(costs[a:b]) for a, b in zip((0, *c), (*c, len(costs)), strict=True))
        for c in combinations(inner, stages - 1)
    )
    assert max(runs) == best


@pytest.mark.parametrize(
    ("layers", "stages", "world"), [(30, 4, 4), (7, 2, 4), (40, 16, 32), (1, 4, 4), (5, 1, 3)]
)
def test_every_unit_is_in_one_stage_of_equal_degree(layers: int, stages: int, world: int) -> None:
    plan = static_plan(small_model(layers), stages, world)
    plan.check(2 * layers + 2, world)
    assert plan.degrees == (world // stages,) * stages
    # Megatron's rank order: pipeline outermost.
    assert [d for s in plan.stages for d in s.group] == list(range(world))


def test_a_head_worth_several_layers_gets_a_stage_with_fewer() -> None:
    plan = static_plan(small_model(8), 2, 2)
    assert plan.stages[0].stop > plan.stages[1].stop - plan.stages[1].start


def test_given_layers_of_the_first_and_last_stage() -> None:
    plan = static_plan(small_model(20), 2, 2, last_layers=1)
    assert str(plan) == "0:39@0 | 39:42@1"
    plan = static_plan(small_model(20), 4, 4, first_layers=1, last_layers=2, unit="layer")
    assert plan.stages[0].stop == 3
    assert plan.stages[-1].start == 37
    assert all(s.start % 2 for s in plan.stages[1:])


def test_megatron_layouts() -> None:
    layers = small_model(4).layers
    assert layout_cuts(layers, "Et|tt*2|L", 3) == (0, 3, 9, 10)
    assert layout_cuts(layers, "E|(tt|)*2L", 4) == (0, 1, 5, 9, 10)
    assert layout_cuts(layers, [3, 1], 2) == (0, 7, 10)
    assert layout_cuts(layers, [4], 1) == (0, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_size": 2, "world_size": 5}, "not divisible"),
        ({"pipeline_size": 11, "world_size": 11}, "11 stages cannot share 10 units"),
        ({"pipeline_size": 7, "world_size": 7, "unit": "layer"}, "whole layers"),
        ({"pipeline_size": 2, "world_size": 2, "first_layers": 9}, "between 0 and the model's"),
        ({"pipeline_size": 1, "world_size": 1, "first_layers": 1}, "at least 2"),
        (
            {"pipeline_size": 2, "world_size": 2, "first_layers": 1, "last_layers": 1},
            "cannot share",
        ),
        ({"pipeline_size": 2, "world_size": 2, "layout": "Ett|tL"}, "then 4 t"),
        ({"pipeline_size": 2, "world_size": 2, "layout": "Etttt|m|L"}, "unknown layer letters"),
        ({"pipeline_size": 2, "world_size": 2, "layout": "Ett|tt|L"}, "3 stages"),
        ({"pipeline_size": 3, "world_size": 3, "layout": "Ett||ttL"}, "is empty"),
        (
            {"pipeline_size": 2, "world_size": 2, "layout": "Ett|ttL", "last_layers": 1},
            "fixes every stage",
        ),
    ],
)
def test_what_cannot_be_says_which_flag_to_change(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        static_plan(small_model(4), **arguments)  # type: ignore[arg-type]


def test_flops_are_six_a_parameter_and_token_without_attention() -> None:
    for config in MODELS.values():
        work = total_work(model_work(config))
        words = config.padded_vocab_size * config.hidden_size
        matrices = total_parameters(config)
        if config.position_embedding_type == "learned_absolute":
            matrices -= config.max_position_embeddings * config.hidden_size
        assert work.linear == pytest.approx(2 * matrices, rel=0.01)
        assert words > 0
        assert iteration_flops(config, 10, 0) == pytest.approx(3 * work.linear * 10)


def test_attention_grows_with_the_square_and_a_causal_mask_halves_it() -> None:
    causal = total_work(model_work(small_model(2)))
    both = total_work(model_work(small_model(2, causal=False)))
    assert both.quadratic == 2 * causal.quadratic == 2 * 2 * 2 * 1024
    # Two micro-batches of 2,048 tokens: one sample, against 64 of 32.
    one, many = causal.forward(2048, 2048**2), causal.forward(2048, 64 * 32**2)
    assert one > 1.05 * many


def test_plans_of_presets_round_trip() -> None:
    plan = static_plan(MODELS["gpt-13b"], 8, 32, unit="layer")
    assert Plan.parse(str(plan)) == plan


def test_the_slowest_stage_comes_before_the_evenness_of_all() -> None:
    # By squares alone the cuts would be 1, 2, 4, whose largest sum is 11.
    assert bottleneck_cuts([5, 4, 6, 2, 9, 2], 4) == (0, 2, 4, 5, 6)


def test_a_first_stage_of_a_number_of_layers_has_the_embedding_and_whole_layers() -> None:
    plan = static_plan(small_model(6), 3, 3, first_layers=2, last_layers=1)
    assert (plan.stages[0].stop, plan.stages[2].start) == (1 + 4, 1 + 12 - 2)
