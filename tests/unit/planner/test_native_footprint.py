"""Native peaks are the very bits of plain Python's, which says what is in use when."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import LayerList
from megatron_flex.planner.footprint import Footprint
from megatron_flex.planner.plan import OPlan, Plan
from megatron_flex.planner.tensor import ALONE, TensorParallel
from megatron_flex.schedule.instructions import Program
from tests.oracles.footprint import device_peaks
from tests.unit.planner.test_passes import MODELS
from tests.unit.schedule.test_native_programs import drawn


def config_of(rng: random.Random, layers: LayerList) -> ModelConfig:
    config = MODELS[rng.choice(["gpt", "no dropout", "grouped, gated, rope", "gated bf16"])]
    untied = not layers.tied
    return replace(config, num_layers=layers.num_layers, untie_embeddings_and_output_weights=untied)


def random_savings(rng: random.Random, plan: Plan) -> Plan:
    """The plan with units that are recomputed, offloaded, and whose states are on the host."""
    often = rng.choice([0.0, 0.3, 1.0])
    units = [u for u in range(plan.num_units) if rng.random() < often]
    recompute = {u for u in units if rng.random() < 0.4}
    shard = plan.o_plan.shard
    optimizer = tuple(u for u in units if rng.random() < 0.5 and u not in shard)
    activations = tuple(u for u in units if u not in recompute)
    return replace(
        plan, o_plan=OPlan(tuple(sorted(recompute)), optimizer, activations, False, shard)
    )


def case(seed: int) -> tuple[Footprint, Program, Sequence[int]]:
    """A random program of a model with memory optimisation, and which tokens are of slices."""
    rng = random.Random(seed)
    built, layers, _, _ = drawn(seed, devices=6, batches=12)
    program = replace(built.program, plan=random_savings(rng, built.program.plan))
    if program.next_plan is not None:
        program = replace(program, next_plan=random_savings(rng, program.next_plan))
    sliced = [0] * len(program.tokens)
    for chain in program.chains:
        for m in chain:
            sliced[m] = rng.randint(1, program.tokens[m])
    shared, server = rng.choice([(ALONE, 0), (TensorParallel(2), rng.randint(1, 3))])
    footprint = Footprint(
        config_of(rng, layers), exact=rng.random() < 0.3, tensor=shared, divided=server
    )
    return footprint, program, sliced if rng.random() < 0.8 else ()


def test_peaks_are_those_of_the_oracle(count: Callable[[int, int], int]) -> None:
    for seed in range(count(200, 5000)):
        footprint, program, sliced = case(seed)
        devices = range(len(program.instructions))
        expected = tuple(device_peaks(footprint, program, d, sliced) for d in devices)
        assert footprint.devices(program, sliced) == expected, f"seed {seed}"
        alone = devices[seed % len(devices)]
        assert footprint.device(program, alone, sliced) == expected[alone]
