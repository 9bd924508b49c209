"""Bytes of slices and of the buffers of cut samples, against what the allocator counts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megatron_flex.data.microbatch import Slice
from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.model.prefix import PrefixStore
from megatron_flex.model.tape import Tape, recording
from megatron_flex.planner.footprint import Footprint
from megatron_flex.planner.memory import chain_bytes
from megatron_flex.planner.passes import passes, slice_passes
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.memory import Expected, MemoryMeter
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.recompute import recomputed
from megatron_flex.runtime.step import StepInputs
from megatron_flex.runtime.world import World
from megatron_flex.schedule.instructions import Compute
from megatron_flex.schedule.part import part_of
from tests.unit.model.slices import packed, two_chains
from tests.unit.planner.test_passes import MODELS, Counted, agree, block_of, highest, wide
from tests.unit.runtime.test_slices import Parts, by_chain, fused, program_of, split

CPU = torch.device("cpu")
LENGTH = 2500


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """An executor refers to itself: those of tests go before and after, not in between."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def count(config: ModelConfig, sliced: int, others: int, *, again: bool, halves: bool) -> Counted:
    """Forward and backward of an attention unit with the last slice of a sample, counted.

    The buffers of the sample are there all the time.
    """
    block, store = block_of(config, Kind.ATTENTION), PrefixStore(training=True)
    meter = MemoryMeter(CPU)
    first, last = Slice(0, 0, LENGTH - sliced, LENGTH), Slice(0, LENGTH - sliced, LENGTH, LENGTH)
    dtype = next(block.parameters()).dtype
    size = config.hidden_size
    with torch.no_grad():
        block(torch.randn(first.tokens, 1, size, dtype=dtype), _batch(config, store, first))
    parts = [last, *([Slice.all_of(1, others)] if others else [])]
    batch, tokens = _batch(config, store, *parts), sliced + others
    context = block.context(batch, CPU)
    if config.position_embedding_type == "rope":
        context.rotary  # noqa: B018 - made once for all blocks
    context.token_keys, context.positions  # noqa: B018
    width = -(-config.kv_channels // 16) * 16
    hidden = torch.randn(tokens, 1, size, dtype=dtype, requires_grad=True)
    begin = meter.current
    meter.begin()
    tape = Tape() if halves else None
    if again:
        output = recomputed(block, hidden, batch)
    else:
        with recording(tape):
            output = block(hidden, batch)
    forward = meter.peak - begin
    edge, gradient = get_gradient_edge(output), torch.ones_like(output)
    grown = gradient.untyped_storage().nbytes()
    del output
    kept = meter.current - grown - begin
    store.going_back(0, last).sums(config.num_query_groups, LENGTH, width)
    begin = meter.current
    meter.begin()
    torch.autograd.backward(edge, gradient)
    backward = meter.peak - begin
    if tape is None:
        return Counted(forward, kept, backward)
    before = begin - kept - grown
    del edge, gradient
    hidden.grad = None
    owed = meter.current - before
    meter.begin()
    tape.run()
    return Counted(forward, kept, backward, owed, meter.peak - before)


def _batch(config: ModelConfig, store: PrefixStore, *parts: Slice) -> PackedBatch:
    return replace(packed(parts, config), prefixes=store)


@pytest.mark.parametrize(
    "name", ["gpt", "no dropout", "grouped, gated, rope", "normed heads", "gated bf16"]
)
@pytest.mark.parametrize(("sliced", "others"), [(1500, 0), (900, 600)])
def test_levels_of_slices_are_what_the_allocator_counts(
    name: str, sliced: int, others: int
) -> None:
    config = replace(wide(MODELS[name]), max_position_embeddings=LENGTH)
    expected, tokens = slice_passes(config), sliced + others
    kept = expected.kept * tokens + expected.kept_sliced * sliced
    found = count(config, sliced, others, again=False, halves=False)
    assert found.kept == pytest.approx(kept, rel=0.002, abs=3000)
    assert agree(found.forward, highest(expected.forward, tokens, sliced), config)
    whole = kept + highest(expected.backward, tokens, sliced)
    assert agree(found.kept + found.backward, whole, config)
    found = count(config, sliced, others, again=False, halves=True)
    half = kept + highest(expected.backward_input, tokens, sliced)
    assert agree(found.kept + found.backward, half, config, abs=6000)
    assert found.owed == pytest.approx(expected.owed * tokens, rel=0.002, abs=4000)
    found = count(config, sliced, others, again=True, halves=False)
    assert found.kept == 0
    assert agree(found.forward, highest(expected.unkept, tokens, sliced), config)
    again = max(highest(expected.forward, tokens, sliced), whole)
    if config.params_dtype == "float32":
        assert found.backward == pytest.approx(again, rel=0.04)


def test_a_micro_batch_that_is_only_a_slice_keeps_less_than_a_whole_sample() -> None:
    for name in ("gpt", "grouped, gated, rope"):
        config = wide(MODELS[name])
        cut, whole = slice_passes(config), passes(config)[Kind.ATTENTION]
        assert cut.kept + cut.kept_sliced <= whole.kept - chain_bytes(config).keys_values


MODEL = wide(replace(MODELS["grouped, gated, rope"], num_layers=2, attention_dropout=0.1))
UNITS = MODEL.layers.num_units
LENGTHS = (800, 600, 75, 45, 150)


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (fused, f"0:{UNITS}@0"),
        (split, f"0:{UNITS}@0"),
        (by_chain, f"0:3@0 | 3:{UNITS}@0"),
        (split, f"0:3@0 | 3:{UNITS}@0"),
        (split, f"0:1@0 | 1:4@0 | 4:{UNITS}@0"),
        (split, f"0:{UNITS - 1}@0 | {UNITS - 1}:{UNITS}@0 ; recompute 2"),
        (fused, f"0:{UNITS}@0 ; recompute 1-{UNITS - 1}"),
        (split, f"0:{UNITS}@0 ; recompute 3"),
        (fused, f"0:{UNITS}@0 ; activations 1-{UNITS - 2}"),
        (split, f"0:3@0 | 3:{UNITS}@0 ; activations 1-{UNITS - 2}"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
@pytest.mark.parametrize("config", [MODEL, replace(MODEL, num_query_groups=8)], ids=["gqa", "mha"])
def test_predicted_peaks_of_chains_are_the_counted_ones(
    config: ModelConfig,
    make: Callable[[int, Parts], list[Compute]],
    plan: str,
) -> None:
    parsed, parts = Plan.parse(plan), two_chains(LENGTHS, 150)
    holdings = Holdings(config, parsed, 0, CPU)
    executor = Executor(World(0, 1, CPU, timedelta(seconds=10)), holdings, OptimizerConfig())
    program = program_of(config, parsed, parts, make(len(parsed.stages), parts), training=True)
    sliced = [0 if p[0].whole else p[0].tokens for p in parts]
    footprint = Footprint(config)
    inputs = StepInputs(
        lambda m, *_: packed(parts[m], config), (sum(LENGTHS),), StepSize(1e-3, 0.1),
        memory=Expected(*footprint.device(program, 0, sliced)),
    )  # fmt: skip
    for _ in range(2):
        (row,) = executor.run(part_of(program, 0), inputs).measured
        others = holdings.memory.current - footprint.held(parsed, 0)
        assert row.memory - others == pytest.approx(row.predicted, rel=0.01)
