"""Layouts that fit by their program only, beside those that the bound likes best."""

from __future__ import annotations

import pytest

from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.decision import Infeasible
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.planner import Planner
from tests.unit.planner.instances_real import even_batch, small_planner

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    vocab_size=500,
    padded_vocab_size=512,
    max_position_embeddings=512,
    ffn_hidden_size=256,
    kv_channels=16,
    num_query_groups=4,
)


def planner(budget: float, schedule: str, bitwise: bool) -> Planner:
    return small_planner(2, config=MODEL, schedule=schedule, exact_memory=True,
                         bitwise=bitwise, budget=int(budget))  # fmt: skip


def two_stages(units: int, devices: int) -> list[Plan]:
    return [
        Plan.parse(f"0:{cut}@0-{d - 1} | {cut}:{units}@{d}-{devices - 1}")
        for cut in range(1, units)
        for d in range(1, devices)
    ]


@pytest.mark.parametrize(
    ("schedule", "bitwise"), [("1f1b", False), ("1f1b", True), ("gpipe", True)]
)
def test_a_batch_that_fits_some_layout_is_not_refused(schedule: str, bitwise: bool) -> None:
    batch = even_batch(6, 400)

    def some_fits(budget: float) -> bool:
        p = planner(budget, schedule, bitwise)
        finder = p.finder([batch])
        plans = two_stages(MODEL.layers.num_units, 2)
        fitted = (p.fitted(finder, finder.best_of(plan, None)) for plan in plans)
        return any(candidate.price.fits for candidate in fitted)

    low, high = 1e5, 1e9
    while high > 1.005 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if some_fits(middle) else (middle, high)
    p = planner(high, schedule, bitwise)
    assert p.fitter is not None
    assert max(p.maker.keep(p.decide([batch], None).plan, batch).peaks) <= high
    with pytest.raises(Infeasible, match="no plan fits"):
        planner(0.5 * low, schedule, bitwise).decide([batch], None)
