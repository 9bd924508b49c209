"""The validator follows sharded optimizer state, and names the step of every broken program."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.instructions import (
    Drop,
    GatherParameters,
    GlobalNorm,
    Instruction,
    Program,
    Recut,
    RecvPiece,
    ReduceGradient,
    ScatterGradient,
    SendPiece,
    SendState,
    SquaredNorm,
    UpdateOrSkip,
)
from megatron_flex.schedule.list_scheduler import policy
from megatron_flex.schedule.text import dumps, loads
from megatron_flex.schedule.transition import transition
from megatron_flex.schedule.validate import ProgramError, validate
from tests.unit.schedule.building import build
from tests.unit.schedule.switches import (
    LAYERS,
    TOKENS,
    check_accepted,
    edited,
    find,
    inserted,
    moved,
    put,
    random_switch,
    refused,
    without,
)

ELEMENTS = tuple(1024 * n for n in (0, 3, 5, 3, 5, 3, 5, 2, 7))
STEADY = "0:4@0,1 | 4:8@2,3 ; shard 0-7"
#: Device 1 gives up slabs 1 to 3 to device 2, which joins; 4 to 7 cease to be sharded.
AFTER = "0:4@0,2 | 4:8@2,3 ; shard 0-3"


def program(before: str = STEADY, after: str | None = None, name: str = "1f1b") -> Program:
    plan = Plan.parse(before)
    switch = None
    if after is not None:
        switch = transition(plan, Plan.parse(after), LAYERS, elements=ELEMENTS)
    costs = OpCosts.scaled([4] * len(plan.stages), TOKENS)
    built = build(plan, LAYERS, costs, TOKENS, policy(name), world_size=4, switch=switch).program
    validate(built, LAYERS)
    return built


def test_every_generated_switch_with_shards_is_accepted(count: Callable[[int, int], int]) -> None:
    kinds: set[type[Instruction]] = set()
    for seed in range(count(200, 6000)):
        drawn = random_switch(seed, devices=8, batches=8, sharded=True)
        built = drawn.build()
        kinds |= {type(step) for steps in built.instructions for step in steps}
        check_accepted(drawn, built, seed)
        assert loads(dumps(built)) == built
    assert {ScatterGradient, GatherParameters, Recut, SendPiece, RecvPiece, SendState} <= kinds


def test_a_steady_iteration_scatters_updates_and_gathers() -> None:
    steps = program().instructions[1]
    of_slab = [type(s).__name__ for s in steps if getattr(s, "slab", None) == 2]
    assert of_slab == ["ScatterGradient", "SquaredNorm", "UpdateOrSkip", "GatherParameters"]
    assert not [s for s in steps if type(s) is ReduceGradient]


def test_a_cut_reduces_over_old_and_new_holders_and_gathers_over_the_new() -> None:
    built = program(STEADY, AFTER)
    for device in (0, 1, 2):
        assert ReduceGradient(2, (0, 1, 2)) in built.instructions[device]
    assert GatherParameters(2, (0, 2)) in built.instructions[2]
    assert GatherParameters(2, (0, 2)) not in built.instructions[1]
    gathered = [s for s in built.instructions[3] if isinstance(s, GatherParameters)]
    assert gathered == [GatherParameters(8, (0, 2, 3))]  # the tied embedding
    assert Drop(2) in built.instructions[1]


def test_a_program_without_the_sizes_of_slabs_is_refused() -> None:
    with pytest.raises(ProgramError, match="give the number of elements"):
        validate(replace(program(STEADY, AFTER), elements=()), LAYERS)


# -- steady iterations -------------------------------------------------------------------------


def test_a_missing_gather_is_refused_at_the_end() -> None:
    built = program()
    device, step, _ = find(built, GatherParameters, slab=3, on=1)
    broken = without(built, device, step)
    message = "without gathering the parameters of slab 3"
    assert refused(broken, message) == (1, len(broken.instructions[1]))


def test_a_gather_before_the_update_is_refused() -> None:
    built = program()
    device, step, _ = find(built, GatherParameters, slab=2, on=1)
    assert refused(moved(built, device, step, step - 1), "gathered before its update") == (
        device,
        step - 1,
    )


def test_a_second_gather_is_refused() -> None:
    built = program()
    device, step, op = find(built, GatherParameters, slab=2, on=1)
    broken = inserted(built, device, step + 1, op)
    assert refused(broken, "gathered a second time") == (device, step + 1)


def test_a_gather_over_another_group_is_refused() -> None:
    built = program()
    device, step, op = find(built, GatherParameters, slab=2, on=1)
    broken = put(built, device, step, replace(op, group=(1, 2)))
    assert refused(broken, "wrong group: slab 2 is held by devices 0, 1") == (device, step)


def test_gathers_in_another_order_than_the_groups_other_members_are_refused() -> None:
    built = program()

    def swap(steps: list[Instruction]) -> None:
        a, b = (steps.index(GatherParameters(slab, (0, 1))) for slab in (1, 2))
        steps[a], steps[b] = steps[b], steps[a]
        steps.insert(steps.index(GlobalNorm()) + 1, steps.pop(steps.index(UpdateOrSkip(2))))

    assert refused(edited(built, 1, swap), "out of order: other members")[0] in (0, 1)


def test_a_gather_of_a_slab_that_is_not_sharded_is_refused() -> None:
    built = program("0:4@0,1 | 4:8@2,3 ; shard 0-3")
    device, step, _ = find(built, UpdateOrSkip, slab=5, on=2)
    broken = inserted(built, device, step + 1, GatherParameters(5, (2, 3)))
    assert refused(broken, "slab 5 is not sharded after this iteration") == (device, step + 1)


@pytest.mark.parametrize("kind", [ReduceGradient, ScatterGradient])
def test_a_reduction_of_the_wrong_kind_is_refused(kind: type[ReduceGradient]) -> None:
    built = program("0:4@0,1 | 4:8@2,3 ; shard 0-3")
    slab = 2 if kind is ReduceGradient else 5
    other = ScatterGradient if kind is ReduceGradient else ReduceGradient
    device, step, op = find(built, other, slab=slab)
    broken = put(built, device, step, kind(op.slab, op.group))
    rule = "only its own part" if kind is ReduceGradient else "all of it"
    assert refused(broken, f"needs the sum of {rule}") == (device, step)


def test_a_holder_that_does_not_count_its_parts_norm_is_refused() -> None:
    built = program()
    device, step, _ = find(built, SquaredNorm, slab=2, on=1)
    refused(without(built, device, step), "devices 1 have not counted the norm of their parts")


def test_a_part_whose_norm_is_counted_twice_is_refused() -> None:
    built = program()
    device, step, op = find(built, SquaredNorm, slab=2, on=1)
    broken = inserted(built, device, step, op)
    assert refused(broken, "counted twice") == (device, step + 1)


def test_a_sharded_slab_does_not_travel_whole() -> None:
    built = program(STEADY, AFTER)
    broken = inserted(built, 0, 0, SendState(2, 2))
    assert refused(broken, "slab 2 is sharded: its state travels in pieces") == (0, 0)


# -- cut anew ----------------------------------------------------------------------------------


def without_piece(built: Program) -> Program:
    """Neither sent nor received: the piece of slab 2 from device 1 to 2."""
    broken = without(built, *find(built, SendPiece, slab=2, on=1)[:2])
    return without(broken, *find(broken, RecvPiece, slab=2, on=2)[:2])


def test_a_missing_cut_is_refused_at_the_update() -> None:
    built = program(STEADY, AFTER)
    broken = without_piece(built)
    broken = without(broken, *find(broken, Recut, slab=2, on=2)[:2])
    assert refused(broken, "has not made room for its new part of slab 2")[0] == 2


def test_room_for_a_wrong_part_is_refused() -> None:
    built = program(STEADY, AFTER)
    device, step, op = find(built, Recut, slab=2, on=2)
    broken = put(built, device, step, replace(op, stop=op.stop - 32))
    assert refused(broken, "wrong part: the next plan gives elements 2560 to 5120") == (2, step)


def test_a_missing_piece_is_refused_at_the_update() -> None:
    built = program(STEADY, AFTER)
    broken = without_piece(built)
    device, step = refused(broken, "device 2 lacks elements 2560 to 5120 of slab 2")
    assert broken.instructions[device][step] == UpdateOrSkip(2)


def test_a_piece_that_is_never_sent_is_refused_at_what_waits_for_it() -> None:
    built = program(STEADY, AFTER)
    # The last one that device 3 sends: the others would only come out of order.
    _, step, op = find(built, SendPiece, -1, on=3)
    device, step = refused(without(built, 3, step), "to send the state of slab")
    assert device == op.peer


def test_a_piece_of_what_another_device_owns_is_refused() -> None:
    built = program(STEADY, AFTER)
    device, step, op = find(built, SendPiece, slab=2)
    broken = put(built, device, step, replace(op, start=op.start - 32))
    assert refused(broken, f"device {device} owns elements") == (device, step)


def test_a_piece_that_is_not_lacking_is_refused() -> None:
    built = program(STEADY, AFTER)
    device, step, op = find(built, RecvPiece, slab=2)
    broken = inserted(built, device, step + 1, op)
    assert refused(broken, "does not lack this piece of slab 2") == (device, step + 1)


def test_a_piece_sent_after_the_update_is_refused() -> None:
    built = program(STEADY, AFTER)
    # The last piece on its way, so that no other overtakes it.
    device, step, op = find(built, SendPiece, slab=7, on=3)
    later = find(built, UpdateOrSkip, slab=7, on=3)[1]
    message = f"stale state: elements {op.start} to {op.stop} of slab 7 is sent after the update"
    assert refused(moved(built, device, step, later), message) == (3, later)
    # An earlier one is not in its turn.
    device, step, _ = find(built, SendPiece, slab=4, on=3)
    later = find(built, UpdateOrSkip, slab=4, on=3)[1]
    assert refused(moved(built, device, step, later), "out of order: device 3 sends")[0] == 3


def test_an_update_by_a_device_that_gives_its_part_up_is_refused() -> None:
    built = program(STEADY, AFTER)
    device, step, _ = find(built, Drop, slab=2, on=1)
    broken = inserted(built, device, step, UpdateOrSkip(2))
    assert refused(broken, "gives up its part of slab 2") == (device, step)


def test_a_cut_after_the_global_norm_is_refused() -> None:
    # Nothing is lacking where a whole state is cut, so no piece is missed before.
    built = program("0:4@0,1 | 4:8@2,3", STEADY)
    device, step, _ = find(built, Recut, slab=2, on=1)
    assert not [s for s in built.instructions[1] if isinstance(s, RecvPiece)]
    at = built.instructions[1].index(GlobalNorm())
    assert refused(moved(built, device, step, at), "cut anew after the global norm") == (1, at)


# -- any valid program, broken at random -------------------------------------------------------

KINDS = (ScatterGradient, GatherParameters, Recut, SendPiece, RecvPiece)


def break_a_shard(rng: random.Random, built: Program) -> tuple[str, Program] | None:
    """One change that makes any program wrong, wherever it is made."""
    places = [
        (device, step)
        for device, steps in enumerate(built.instructions)
        for step, instruction in enumerate(steps)
        if isinstance(instruction, KINDS)
    ]
    if not places:
        return None
    device, step = rng.choice(places)
    op: Any = built.instructions[device][step]
    changes = ["gone", "twice", "other slab"]
    if isinstance(op, Recut | SendPiece | RecvPiece):
        changes.append("other part")
    if isinstance(op, SendPiece | RecvPiece):
        changes.append("other peer")
    if isinstance(op, GatherParameters):
        changes += ["early", "other group"]
    change = rng.choice(changes)
    if change == "gone":
        broken = without(built, device, step)
    elif change == "twice":
        broken = inserted(built, device, step + 1, op)
    elif change == "other slab":
        slab = rng.choice([s for s in range(40) if s != op.slab])
        broken = put(built, device, step, replace(op, slab=slab))
    elif change == "other part":
        key = rng.choice(["start", "stop"])
        by = rng.choice([-64, -32, 32, 64])
        broken = put(built, device, step, replace(op, **{key: getattr(op, key) + by}))
    elif change == "other peer":
        others = [d for d in range(len(built.instructions) + 1) if d != op.peer]
        broken = put(built, device, step, replace(op, peer=rng.choice(others)))
    elif change == "early":
        broken = moved(built, device, step, rng.randint(0, step - 1))
    else:
        broken = put(built, device, step, replace(op, group=(*op.group, 40)))
    return f"{type(op).__name__}: {change}", broken


def test_a_program_broken_anywhere_is_refused(count: Callable[[int, int], int]) -> None:
    changes = set()
    for seed in range(count(400, 6000)):
        drawn = random_switch(seed, devices=6, batches=6, sharded=True)
        found = break_a_shard(random.Random(seed), drawn.build())
        if found is None:
            continue
        change, broken = found
        changes.add(change)
        try:
            validate(broken, drawn.layers)
        except ProgramError as error:
            assert 0 <= error.device < drawn.case.world_size, (seed, change)
        else:
            raise AssertionError(f"seed {seed}, {change}: accepted")
    assert len(changes) == 3 * 5 + 3 + 2 + 2, sorted(changes)
