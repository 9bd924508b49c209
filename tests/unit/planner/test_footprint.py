"""Peaks of programs by their instructions. (That workers count the same is tested with workers.)"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.data.microbatches import CostCoefficients, cut_by_tokens
from megatron_flex.planner.footprint import Footprint
from megatron_flex.planner.levels import envelope
from megatron_flex.planner.memory import slab_elements, state_bytes, total_parameters
from megatron_flex.planner.passes import Level
from megatron_flex.planner.plan import OPlan, Plan
from megatron_flex.programs import build_program
from megatron_flex.schedule.instructions import Program
from megatron_flex.schedule.transition import transition
from tests.distributed.jobs import batch_of
from tests.oracles.footprint import highest
from tests.unit.planner.instances_real import small_model

CONFIG = replace(small_model(4), params_dtype="float32")
UNITS = CONFIG.layers.num_units


def parts() -> tuple[MicroBatch, ...]:
    return cut_by_tokens(batch_of(1, 24, 900), 1000, CostCoefficients())


def program(plan: str | Plan, devices: int, following: Plan | None = None) -> Program:
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan
    switch = None if following is None else transition(parsed, following, CONFIG.layers)
    return build_program(CONFIG, parsed, parts(), devices, switch=switch)


def test_the_envelope_of_levels_is_their_highest_everywhere() -> None:
    rng = random.Random(1)
    for _ in range(500):
        levels = [
            Level(float(rng.choice([0, rng.randint(0, 1000)])), float(rng.randint(-50, 50)))
            for _ in range(rng.randint(1, 12))
        ]
        lines = envelope(levels)
        for tokens in (0.0, 1.0, 2.5, 10.0, 100.0, 1e4):
            assert highest(lines, tokens) == max(level(tokens) for level in levels)


def test_slabs_are_16_bytes_a_parameter_and_8_on_the_host_are_not_on_the_device() -> None:
    footprint, plan = Footprint(CONFIG), Plan.parse(f"0:{UNITS}@0")
    held = footprint.held(plan, 0)
    assert held == pytest.approx(state_bytes(CONFIG, total_parameters(CONFIG)).total, rel=1e-3)
    away = replace(plan, o_plan=OPlan(optimizer=tuple(range(UNITS))))
    own = sum(footprint.window(slab) for slab in range(UNITS))
    assert footprint.held(away, 0) == held - own
    exact = Footprint(CONFIG, exact=True)
    words = footprint.window(UNITS) / 8  # both users of the tied embedding are here
    assert exact.held(plan, 0) == pytest.approx(held * 1.5 + 4 * words)


def all_peaks(footprint: Footprint, program: Program) -> tuple[float, ...]:
    return tuple(map(max, footprint.devices(program)))


def test_an_idle_device_has_nothing() -> None:
    peaks = all_peaks(Footprint(CONFIG), program(f"0:{UNITS}@1", 3))
    assert peaks[0] == peaks[2] == 0.0
    assert peaks[1] > 0.0


@pytest.mark.parametrize(
    "o_plan",
    [OPlan(recompute=(2,)), OPlan(activations=(1, 2)), OPlan(optimizer=(1, 2))],
)
def test_memory_optimisation_lowers_the_peak_of_those_who_do_it(o_plan: OPlan) -> None:
    plan = Plan.parse(f"0:3@0 | 3:6@1 | 6:{UNITS}@2")
    footprint = Footprint(CONFIG)
    before = all_peaks(footprint, program(plan, 3))
    after = all_peaks(footprint, program(replace(plan, o_plan=o_plan), 3))
    assert after[0] < before[0]
    assert after[1:] == before[1:]


def test_two_states_from_the_host_are_worked_on_at_a_time() -> None:
    footprint, plan = Footprint(CONFIG), Plan.parse(f"0:4@0 | 4:{UNITS}@1")
    away = replace(plan, o_plan=OPlan(optimizer=(1, 2, 3, UNITS - 1)))
    largest = sorted(footprint.window(slab) for slab in (1, 2, 3))[-2:]
    assert footprint.windows(away, 0) == sum(largest) > 0.0
    assert footprint.windows(away, 1) == footprint.window(UNITS - 1)
    assert footprint.windows(plan, 0) == 0.0


def test_what_joins_early_is_there_before_the_norm_and_later_where_the_next_plan_wants_it() -> None:
    plan, following = Plan.parse(f"0:5@0 | 5:{UNITS}@1"), Plan.parse(f"0:6@0 | 6:{UNITS}@1")
    footprint = Footprint(CONFIG)
    alone, _ = footprint.device(program(plan, 2), 0)
    joined, _ = footprint.device(program(plan, 2, following), 0)
    assert joined - alone == footprint.slab(5)
    lean = replace(following, o_plan=OPlan(optimizer=(5,)))
    joined, _ = footprint.device(program(plan, 2, lean), 0)
    assert joined - alone == footprint.slab(5, offloaded=True)


def sharded(plan: str, following: str | None = None) -> Program:
    parsed = Plan.parse(plan)
    switch = None
    if following is not None:
        elements = slab_elements(CONFIG)
        switch = transition(parsed, Plan.parse(following), CONFIG.layers, elements=elements)
    return build_program(CONFIG, parsed, parts(), 3, switch=switch)


@pytest.mark.parametrize("degree", [2, 3])
def test_a_holder_of_a_sharded_slab_has_its_part_of_the_state(degree: int) -> None:
    plan = Plan.parse(f"0:{UNITS}@0-{degree - 1}")
    footprint = Footprint(CONFIG)
    lean = sum(footprint.held(plan.sharded(), d) for d in range(degree))
    states = sum(footprint.window(slab) for slab in range(UNITS + 1))
    assert lean == pytest.approx(degree * footprint.held(plan, 0) - (degree - 1) * states)


def test_another_part_is_there_beside_the_present_one_until_the_update() -> None:
    shard = f"; shard 0-{UNITS - 1}"
    before, after = f"0:4@0,1 | 4:{UNITS}@2 {shard}", f"0:4@0-2 | 4:{UNITS}@2 {shard}"
    footprint = Footprint(CONFIG)
    state = sum(footprint.window(slab) for slab in range(4))
    alone = footprint.device(sharded(before), 0)
    cut = footprint.device(sharded(before, after), 0)
    assert cut[0] - alone[0] == pytest.approx(state / 3, rel=1e-3)
    early = footprint.cut_anew(Plan.parse(before), Plan.parse(after), 3)
    assert early[0] == early[1] == pytest.approx(state / 3, rel=1e-3)
    joined = sum(footprint.slab(slab) for slab in range(4)) - 2 / 3 * state
    assert early[2] == pytest.approx(joined, rel=1e-3)


def test_a_whole_state_is_cut_by_the_update_with_room_for_both() -> None:
    plan = f"0:{UNITS}@0,1"
    footprint = Footprint(CONFIG)
    before, _ = footprint.device(sharded(plan), 0)
    peak, updates = footprint.device(sharded(plan, f"{plan} ; shard 3"), 0)
    assert peak == before
    assert updates == footprint.held(Plan.parse(plan), 0) + footprint.slab(3) - (
        footprint.window(3) / 2
    )


def test_what_is_handed_over_is_there_beside_what_goes() -> None:
    plan, following = Plan.parse(f"0:5@0 | 5:{UNITS}@1"), Plan.parse(f"0:6@0 | 6:{UNITS}@1")
    footprint = Footprint(CONFIG)
    sizes = footprint.handed_over(plan, following, {(5, 0)}, 2)
    # The first keeps all and gets one; the second still has what it sends.
    assert sizes[0] == footprint.held(plan, 0) + footprint.slab(5)
    assert sizes[1] == footprint.held(plan, 1)
    assert footprint.handed_over(plan, following, set(), 2)[1] == footprint.held(following, 1)


def test_offload_takes_from_the_peak_of_a_chain_most_of_what_moves() -> None:
    cut = [MicroBatch((Slice(0, 256 * i, 256 * (i + 1), 4096),)) for i in range(16)]
    footprint, plan = Footprint(CONFIG), Plan.parse(f"0:{UNITS}@0")
    away = replace(plan, o_plan=OPlan(activations=tuple(range(1, UNITS - 1))))
    stays, goes = (build_program(CONFIG, p, cut, 1, policy="gpipe") for p in (plan, away))
    moved = footprint.travelling(away, 0, 256, 256) * 15  # the last one goes back at once
    first, second = (footprint.device(p, 0, [256] * 16)[0] for p in (stays, goes))
    assert 0.6 * moved < first - second < moved
