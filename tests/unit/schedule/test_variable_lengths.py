"""On variable-length micro-batches: the published figures reproduced, and ours against them."""

from __future__ import annotations

import pytest

from benchmarks.schedules import Batch, even, load, ours
from megatron_flex.schedule.list_scheduler import policy, simulate

BATCHES = load()


@pytest.mark.parametrize("devices", [4, 8])
def test_1f1b_takes_the_published_time_and_memory(devices: int) -> None:
    for batch in BATCHES[devices]:
        layout = even(batch, v=False)
        placed = simulate(layout.plan, layout.costs, policy("1f1b"))
        makespan, peak = batch.published["1F1B"]
        assert placed.makespan == pytest.approx(makespan, rel=1e-5)
        assert layout.peak(placed.peak) == pytest.approx(peak, rel=1e-5)


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize(
    ("name", "published"),
    [("zb-h1", "ZB-H1"), ("zb-h2", "ZB-H2"), ("zb-v", "ZB-V"), ("v-half", "V-Half"),
     ("v-min", "V-Min")],
)  # fmt: skip
def test_zero_bubble_orders_replayed_at_true_costs_are_as_good_as_published(
    name: str, published: str, devices: int
) -> None:
    """The published planner uses the median cost, so its order differs a little from the book's."""
    for batch in BATCHES[devices]:
        layout = even(batch, v="v" in name.split("-"))
        placed = simulate(layout.plan, layout.costs, policy(name))
        makespan, peak = batch.published[published]
        assert placed.makespan == pytest.approx(makespan, rel=0.005)
        assert layout.peak(placed.peak) <= peak * (1 + 1e-6)


@pytest.mark.parametrize(
    ("devices", "blocks", "within", "bubble"),
    [
        (4, False, "", 0.080),
        (8, False, "", 0.168),
        (4, True, "", 0.016),
        (8, True, "", 0.065),
        (4, True, "ZB-V", 0.036),
        (8, True, "ZB-V", 0.075),
    ],
)
def test_a_v_found_with_eight_simulations_has_a_small_bubble(
    devices: int, blocks: bool, within: str, bubble: float
) -> None:
    row = ours(BATCHES[devices], "V", blocks, within=within)
    assert row.simulations <= 8
    assert row.floor - 1e-9 <= row.bubble <= bubble
    if within:
        peaks = [batch.published[within][1] for batch in BATCHES[devices]]
        assert row.peak_gb <= sum(peaks) / len(peaks) / 1024


def test_uneven_degrees_beat_what_any_even_layout_on_eight_devices_can_reach() -> None:
    row = ours(BATCHES[8], "V", True, degrees=(2, 3, 3))
    assert row.bubble <= 0.02
    even_floor = ours(BATCHES[8], "V", True).floor
    assert row.bubble < even_floor


def test_dynapipe_is_beaten_on_every_batch() -> None:
    def makespan(batch: Batch) -> float:
        row = ours([batch], "V", True, within="ZB-V")
        return batch.work / batch.devices / (1 - row.bubble)

    for batches in BATCHES.values():
        for batch in batches:
            published, peak = batch.published["DynaPipe (permuted)"]
            assert makespan(batch) < 0.95 * published
            assert batch.published["ZB-V"][1] < peak
