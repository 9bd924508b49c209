"""Optimizer state on the host: brought in for its update, a bounded number of slabs at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.memory import MemoryMeter
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize, update
from megatron_flex.runtime.swap import OptimizerSwap
from megatron_flex.schedule.residency import WINDOW
from tests.unit.model.support import make_config
from tests.unit.runtime.slabs import CPU


def holdings(dtype: str) -> Holdings:
    config = replace(make_config(), num_layers=3, params_dtype=dtype)  # type: ignore[arg-type]
    units = config.layers.num_units
    held = Holdings(config, Plan.parse(f"0:{units}@0"), 0, CPU)
    generator = torch.Generator().manual_seed(1)
    for slab in held:
        slab.grads.normal_(generator=generator)
    return held


def step(held: Holdings, updates: int) -> int:
    """Update all slabs; the most bytes above those in use."""
    swap, meter = OptimizerSwap(CPU), MemoryMeter(CPU)
    begin = meter.current
    meter.begin()
    swap.begin(held)
    for slab in held:
        swaps = slab.offloaded and slab.layout.numel > 0
        brought = (swap.take(slab),) if swaps else ()
        update(slab, OptimizerConfig(), StepSize(1e-2, 0.1), 0.5, updates, *brought)
        del brought
        if swaps:
            swap.give(slab)
    swap.settle()
    assert meter.current <= begin + 100
    return meter.peak - begin


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_have_the_same_bits_and_bring_in_two_slabs_at_most(dtype: str) -> None:
    here, there = holdings(dtype), holdings(dtype)
    for number in (0, 1, 2, 3, 4, 5):
        grads = there.slabs[number].grads.clone()
        there.slabs[number].grads.zero_()
        there.rehouse(number, offloaded=True)
        there.slabs[number].grads.copy_(grads)
    each = 8 if dtype == "float32" else 12
    largest = sorted(each * there.slabs[n].layout.numel for n in range(6))[-WINDOW:]
    for updates in range(3):
        step(here, updates)
        assert step(there, updates) <= sum(largest) + 5000
    expected = here.named_state(owned=True)
    got = there.named_state(owned=True)
    assert all(torch.equal(v, got[name]) for name, v in expected.items())
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a.state, b.state)


def test_what_was_brought_in_for_a_skipped_update_goes() -> None:
    held = holdings("float32")
    for slab in held:
        slab.grads.zero_()
    held.rehouse(2, offloaded=True)
    before = held.slabs[2].state.clone()
    swap, meter = OptimizerSwap(CPU), MemoryMeter(CPU)
    begin = meter.current
    swap.begin(held)
    assert meter.current > begin
    swap.settle()
    assert meter.current == begin
    assert torch.equal(held.slabs[2].state, before)
