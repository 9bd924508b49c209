"""Bytes in use: counted as PyTorch's profiler sees them, predicted as they are counted."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from megatron_flex.data.microbatches import CostCoefficients, cut_by_tokens
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.footprint import Footprint
from megatron_flex.planner.plan import Plan
from megatron_flex.programs import build_program
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.memory import Expected, MemoryMeter
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.step import StepInputs, StepResult
from megatron_flex.runtime.world import World
from megatron_flex.schedule.part import part_of
from tests.distributed import jobs

CPU = torch.device("cpu")
CONFIG = replace(jobs.TINY, hidden_size=64, ffn_hidden_size=256, kv_channels=16, hidden_dropout=0.1)
WHOLE = f"0:{CONFIG.layers.num_units}@0"


class Worker:
    """A worker of a world of one."""

    def __init__(
        self, plan: str = WHOLE, exact: bool = False, config: ModelConfig = CONFIG
    ) -> None:
        gc.collect()  # an executor refers to itself: those of other tests go now, not in between
        self.plan = Plan.parse(plan)
        self.world = World(0, 1, CPU, timedelta(seconds=10))
        self.config = config
        self.holdings = Holdings(config, self.plan, 0, CPU, exact=exact)
        self.executor = Executor(self.world, self.holdings, OptimizerConfig())
        self.footprint = Footprint(config, exact=exact)

    def step(
        self, iteration: int = 0, budget: float | None = None, policy: str = "1f1b"
    ) -> StepResult:
        batch = jobs.batch_of(iteration)
        parts = cut_by_tokens(batch, 100, CostCoefficients())
        program = build_program(self.config, self.plan, parts, 1, policy=policy)
        expected = Expected(*self.footprint.device(program, 0), budget)
        read: Any = partial(jobs._read, self.config, parts, frozenset())
        inputs = StepInputs(read, batch.denominators, StepSize(1e-3, 0.1), memory=expected)
        return self.executor.run(part_of(program, 0), inputs)


@pytest.fixture(scope="module")
def worker() -> Worker:
    found = Worker()
    found.step()
    return found


def allocator_peak(run: Callable[[], object]) -> int:
    """The most bytes above those at the start, by the profiler's record of the allocator."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    sizes = []
    stack = list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = most = 0
    for _, size in sorted(sizes, key=lambda item: item[0]):
        now += size
        most = max(most, now)
    return most


def test_peaks_are_those_of_the_profilers_allocator_events(worker: Worker) -> None:
    memory = worker.holdings.memory
    assert memory.available
    begin = memory.current
    found: list[StepResult] = []
    peak = allocator_peak(lambda: found.append(worker.step(1)))
    counted = max(found[0].measured[0].memory, memory.peak) - begin
    # What the profiler itself allocates in between is a few numbers.
    assert peak == pytest.approx(counted, rel=1e-3)
    assert peak > 1e6


@pytest.mark.parametrize("o_plan", ["", " ; recompute 1-6", " ; recompute 2,7"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("policy", ["1f1b", "zb"])
def test_predicted_peaks_are_the_counted_ones(o_plan: str, exact: bool, policy: str) -> None:
    holds(Worker(WHOLE + o_plan, exact), policy)


UNTIED = replace(CONFIG, untie_embeddings_and_output_weights=True, hidden_dropout=0.0)


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("stages", [(4,), (1, 4, 7)])
@pytest.mark.parametrize("o_plan", ["", " ; recompute 3-4", " ; activations 1-6"])
@pytest.mark.parametrize("policy", ["gpipe", "zb"])
def test_predicted_peaks_of_several_stages_on_a_device(
    config: ModelConfig, stages: tuple[int, ...], o_plan: str, policy: str
) -> None:
    ends = (0, *stages, config.layers.num_units)
    plan = " | ".join(f"{a}:{b}@0" for a, b in itertools.pairwise(ends))
    holds(Worker(plan + o_plan, config=config), policy, iterations=2)


def holds(worker: Worker, policy: str, iterations: int = 3) -> None:
    """Expect peaks within 1 %."""
    for iteration in range(iterations):
        (row,) = worker.step(iteration, policy=policy).measured
        # This process may hold tensors of other tests.
        others = worker.holdings.memory.current - sum(
            t.untyped_storage().nbytes()
            for slab in worker.holdings
            for t in (slab.state, slab.grads, *([slab.sums] if slab.sums is not None else []))
        )
        others -= int(worker.footprint._twice_tied(worker.plan, 0))
        assert row.memory - others == pytest.approx(row.predicted, rel=0.01)


def test_a_tensor_held_on_purpose_is_counted(worker: Worker) -> None:
    honest = worker.step(2).measured[0].memory
    held: list[torch.Tensor] = []

    def hold(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        held.append(output.detach().clone())

    handle = worker.holdings.blocks[3].register_forward_hook(hold)
    try:
        leaking = worker.step(2).measured[0].memory
    finally:
        handle.remove()
    # All of them at the last micro-batch, and one fewer at an earlier peak.
    most = sum(t.nbytes for t in held)
    least = most - max(t.nbytes for t in held)
    assert len(held) > 2
    assert least <= leaking - honest <= most
    held.clear()
    assert worker.step(2).measured[0].memory == pytest.approx(honest, rel=1e-3)


def test_what_the_pool_keeps_does_not_count_and_goes_when_the_budget_needs_it() -> None:
    worker = Worker()
    (first,) = worker.step(0).measured
    pool = worker.holdings.pool
    extra = pool.take(1 << 20)
    pool.give(extra)
    del extra
    kept = pool.kept
    assert kept >= 16 << 20
    assert worker.step(0).measured[0].memory == pytest.approx(first.memory, rel=1e-3)
    assert pool.kept == kept
    worker.step(0, budget=first.predicted + 100)
    assert pool.kept == 0


def test_a_meter_counts_from_its_mark() -> None:
    meter = MemoryMeter(CPU)
    before = meter.current
    meter.begin()
    tensor = torch.empty(1000, dtype=torch.float64)
    del tensor
    assert meter.peak == before + 8000
    assert meter.current == before
    meter.begin()
    assert meter.peak == before
    kept = torch.empty(100, dtype=torch.float64)
    meter.set_aside(800)
    assert meter.peak == before + 800  # as it was before
    meter.begin(800)
    assert meter.peak == before
    assert kept.numel() == 100
