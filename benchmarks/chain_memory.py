"""What activations on the host take from the peak of one long sample in slices.

A table of ``benchmarks/memory.py``: one process, all slices forward, then all back, so that the
first ones wait longest. Iterations with and without offload by turns.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from datetime import timedelta

import torch

from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.footprint import Footprint
from megatron_flex.planner.plan import OPlan, Plan
from megatron_flex.programs import build_program
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.memory import Expected
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.step import StepInputs
from megatron_flex.runtime.world import World
from megatron_flex.schedule.part import Part, part_of
from megatron_flex.schedule.residency import travels

CPU = torch.device("cpu")


@dataclass
class _Way:
    """One plan: who runs it, what, and the seconds and peaks that it took."""

    executor: Executor
    part: Part
    inputs: StepInputs
    seconds: list[float]
    peak: float = 0.0


def table(model: ModelConfig, slices: int, tokens: int, cycles: int) -> None:
    """Run and print; ``tokens`` of each slice."""
    torch.set_num_threads(1)
    length = slices * tokens
    model = replace(model, max_position_embeddings=max(length, model.max_position_embeddings))
    cut = [Slice(0, i * tokens, (i + 1) * tokens, length) for i in range(slices)]
    micro_batches = [MicroBatch((piece,)) for piece in cut]
    footprint, units = Footprint(model), model.layers.num_units
    numbers = torch.arange(length + 1) % model.vocab_size

    def packed(number: int, *_: bool) -> PackedBatch:
        part = cut[number]
        rows = numbers[part.start : part.stop + 1]
        return PackedBatch(
            (part.tokens,), (0,), (part.start,), rows[:-1], rows[1:],
            torch.ones(part.tokens), totals=(length,),
        )  # fmt: skip

    ways: dict[str, _Way] = {}
    moved = 0.0
    for name, o_plan in (
        ("none", OPlan()),
        ("offload activations", OPlan(activations=tuple(range(1, units - 1)))),
    ):
        plan = Plan.parse(f"0:{units}@0")
        plan = replace(plan, o_plan=o_plan)
        program = build_program(model, plan, micro_batches, 1, policy="gpipe")
        world = World(0, 1, CPU, timedelta(minutes=5))
        executor = Executor(world, Holdings(model, plan, 0, CPU), OptimizerConfig())
        expected = Expected(*footprint.device(program, 0, [tokens] * slices))
        inputs = StepInputs(packed, (length,), StepSize(1e-4, 0.01), memory=expected)
        ways[name] = _Way(executor, part_of(program, 0), inputs, [])
        away = travels(program.instructions[0], plan).passes
        moved += footprint.travelling(plan, 0, tokens, tokens) * len(away)
    for cycle in range(cycles + 1):
        for way in ways.values():
            began = time.perf_counter()
            (row,) = way.executor.run(way.part, way.inputs).measured
            if cycle:  # the first makes buffers
                way.seconds.append(time.perf_counter() - began)
                way.peak = row.memory
    # Both ways' states are in this process.
    other = footprint.held(Plan.parse(f"0:{units}@0"), 0)
    print(f"\na sample of {length} tokens in {slices} slices, one worker")
    print(f"{'':22}{'time (ms)':>10}{'against none':>14}{'peak (MB)':>11}{'predicted':>11}")
    base = ways["none"]
    for name, way in ways.items():
        median = statistics.median(way.seconds)
        more = f"{100 * (median / statistics.median(base.seconds) - 1):+13.1f}%"
        sizes = f"{(way.peak - other) / 1e6:11.1f}{way.inputs.memory.peak / 1e6:11.1f}"
        print(f"{name:22}{1e3 * median:10.0f}{more}{sizes}")
    gain = base.peak - ways["offload activations"].peak
    print(f"{moved / 1e6:.1f} MB move; the peak falls by {gain / 1e6:.1f} MB, {gain / moved:.0%}")
    fastest = min(ways["offload activations"].seconds) / min(base.seconds)
    print(f"fastest iterations: {100 * (fastest - 1):+.1f} %")
