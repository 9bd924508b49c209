"""The validator accepts every switch that is generated and names the step of every broken one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.instructions import (
    Drop,
    Forward,
    GlobalNorm,
    Instruction,
    Program,
    RecvState,
    ReduceGradient,
    SendState,
    SquaredNorm,
    UpdateOrSkip,
)
from megatron_flex.schedule.list_scheduler import policy
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

#: Slabs 0 to 3 on devices 0 and 1, 4 to 7 on 2, the tied embedding (8) on 0, 1, 2; 3 is idle.
BEFORE = Plan.parse("0:4@0,1 | 4:8@2")
#: Slabs 2 and 3 go from 0 and 1 to 3; device 0 drops its share; 2 keeps 4 and 5; 6 to 8 go to 0.
AFTER = Plan.parse("0:2@1 | 2:4@3 | 4:6@2 | 6:8@0")


def program(way: str = "early", name: str = "zb") -> Program:
    """The switch from ``BEFORE`` to ``AFTER``; in the mixed way slab 6 is handed over."""
    late = {"early": frozenset[tuple[int, int]](), "late": None, "mixed": frozenset({(6, 0)})}[way]
    costs = OpCosts.scaled([4, 4], TOKENS)
    switch = transition(BEFORE, AFTER, LAYERS, late=late)
    built = build(BEFORE, LAYERS, costs, TOKENS, policy(name), world_size=4, switch=switch).program
    validate(built, LAYERS)
    return built


def end(given: Program, device: int) -> int:
    """The step at which a list that comes to its end is refused."""
    return len(given.instructions[device])


def norm(given: Program, device: int) -> int:
    """The step of a device's global norm."""
    return given.instructions[device].index(GlobalNorm())


# -- what is generated is accepted -------------------------------------------------------------


def test_every_generated_switch_is_accepted(count: Callable[[int, int], int]) -> None:
    devices = batches = 0
    for seed in range(count(150, 6000)):
        drawn = random_switch(seed)
        built = drawn.build()
        check_accepted(drawn, built, seed)
        devices, batches = (
            max(devices, drawn.case.world_size),
            max(batches, len(drawn.case.tokens)),
        )
    assert (devices, batches) == (16, 64)


@pytest.mark.parametrize("way", ["early", "late", "mixed"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "zb"])
def test_a_switch_is_accepted_under_every_schedule(way: str, name: str) -> None:
    built = program(way, name)
    kinds = {type(step) for steps in built.instructions for step in steps}
    assert {SendState, RecvState, Drop} <= kinds


# -- dropped -----------------------------------------------------------------------------------


def test_a_drop_before_the_global_norm_is_refused() -> None:
    built = program()
    device, step, _ = find(built, Drop, slab=2)
    at = norm(built, device)
    broken = moved(built, device, step, at)
    assert refused(broken, "a slab is dropped before the global norm") == (device, at)


def test_a_drop_before_the_hand_over_is_refused_at_the_send() -> None:
    built = program("late")
    device, step, _ = find(built, Drop, slab=6)
    send = find(built, SendState, slab=6)
    assert send[0] == device
    broken = moved(built, device, step, send[1])
    assert refused(broken, "does not have slab 6 .dropped") == (device, send[1] + 1)


def test_a_drop_before_the_update_of_what_is_handed_over_is_refused_at_the_update() -> None:
    built = program("late")
    device, step, _ = find(built, Drop, slab=6)
    update = find(built, UpdateOrSkip, slab=6, on=device)
    broken = moved(built, device, step, update[1])
    assert refused(broken, "does not have slab 6 .dropped") == (device, update[1] + 1)


def test_a_drop_of_a_slab_that_the_next_plan_needs_is_refused() -> None:
    built = program()
    broken = edited(built, 2, lambda steps: steps.append(Drop(4)))
    expected = (2, end(built, 2))
    assert refused(broken, "slab 4 is dropped, but the next plan gives it to dev") == expected


def test_a_drop_by_a_joiner_is_refused() -> None:
    built = program()
    broken = edited(built, 3, lambda steps: steps.append(Drop(2)))
    expected = (3, end(built, 3))
    assert refused(broken, "slab 2 is dropped, but the next plan gives it to dev") == expected


def test_a_drop_of_a_slab_that_is_not_held_is_refused() -> None:
    built = program()
    broken = edited(built, 3, lambda steps: steps.append(Drop(5)))
    assert refused(broken, "device 3 does not hold slab 5") == (3, end(built, 3))
    broken = edited(built, 3, lambda steps: steps.append(Drop(9)))
    assert refused(broken, "there are only slabs 0 to 8") == (3, end(built, 3))


def test_a_second_drop_is_refused() -> None:
    built = program()
    device, step, drop = find(built, Drop)
    broken = inserted(built, device, step + 1, drop)
    assert refused(broken, "has no slab 0 to drop") == (device, step + 1)


def test_a_slab_kept_that_the_next_plan_does_not_need_is_refused() -> None:
    built = program()
    device, step, _ = find(built, Drop, slab=6)
    broken = without(built, device, step)
    assert refused(broken, "slab 6 is kept, but the next plan does not") == (device, end(broken, 2))


def test_use_after_drop_is_refused() -> None:
    built = program()
    device, step, _ = find(built, Drop, slab=6)
    assert device == 2
    for use in (UpdateOrSkip(6), SendState(6, 0)):
        broken = inserted(built, device, step + 1, use)
        assert refused(broken, "device 2 does not have slab 6 .dropped") == (device, step + 1)


def test_a_dropped_slab_without_its_reduction_is_refused() -> None:
    # Its gradient would be missing on those that keep it.
    built = program()
    device, step, _ = find(built, ReduceGradient, slab=6, on=2)
    error = refused(without(built, device, step), "which lack it|is not reduced")
    assert error[0] in (0, 2)


# -- the joiner's factor -----------------------------------------------------------------------


def test_a_reduction_that_leaves_out_the_joiner_is_refused() -> None:
    built = program()
    device, step, reduce = find(built, ReduceGradient, slab=2, on=0)
    assert reduce.group == (0, 1, 3)
    broken = put(built, device, step, replace(reduce, group=(0, 1)))
    message = "wrong group: slab 2 is held by devices 0, 1, 3"
    assert refused(broken, message) == (device, step)


def test_a_joiner_left_out_by_all_is_refused() -> None:
    built = program()
    broken = built
    for device in (0, 1):
        _, step, reduce = find(broken, ReduceGradient, slab=2, on=device)
        broken = put(broken, device, step, replace(reduce, group=(0, 1)))
    broken = without(broken, *find(broken, ReduceGradient, slab=2, on=3)[:2])
    assert refused(broken, "slab 2 is held by devices 0, 1, 3|slab 2 is not reduced")[0] in (
        0,
        1,
        3,
    )


def test_a_joiner_that_does_not_come_to_the_reduction_is_refused() -> None:
    built = program()
    broken = without(built, *find(built, ReduceGradient, slab=2, on=3)[:2])
    device, step = refused(broken, "slab 2 is not reduced|which lack it")
    assert broken.instructions[device][step] in (ReduceGradient(2, (0, 1, 3)), GlobalNorm())


def test_a_joiner_without_its_update_is_refused() -> None:
    built = program()
    broken = without(built, *find(built, UpdateOrSkip, slab=2, on=3)[:2])
    assert refused(broken, "ends without an update of slab 2") == (3, end(broken, 3))


def test_a_joiner_that_updates_twice_is_refused() -> None:
    built = program()
    device, step, update = find(built, UpdateOrSkip, slab=2, on=3)
    broken = inserted(built, device, step + 1, update)
    assert refused(broken, "updated a second time") == (device, step + 1)


def test_a_joiner_without_the_global_norm_is_refused() -> None:
    built = program()
    at = norm(built, 3)
    assert refused(without(built, 3, at), "before the global norm") == (3, at)


def test_a_joiner_that_counts_the_norm_again_is_refused() -> None:
    built = program()
    assert find(built, SquaredNorm, slab=2)[0] == 0
    broken = inserted(built, 3, norm(built, 3), SquaredNorm(2))
    assert refused(broken, "the norm of slab 2 is counted twice")[0] in (0, 3)


# -- stale state -------------------------------------------------------------------------------


def test_early_state_sent_after_the_senders_update_is_refused() -> None:
    built = program()
    device, step, _ = find(built, SendState, slab=4 + 3, peer=0)
    assert device == 2
    steps = built.instructions[device]
    grown = inserted(built, device, len(steps) - 3, UpdateOrSkip(7))  # it drops the slab otherwise
    validate(grown, LAYERS)
    update = grown.instructions[device].index(UpdateOrSkip(7))
    broken = moved(grown, device, step, update)
    found = refused(broken, "stale state: slab 7 is sent after the update, device 0 takes it as it")
    assert found[0] in (0, 2)


def test_a_hand_over_sent_before_the_update_is_refused() -> None:
    built = program("late")
    device, step, _ = find(built, SendState, slab=6)
    update = find(built, UpdateOrSkip, slab=6, on=device)
    broken = moved(built, device, step, update[1])
    message = "stale state: slab 6 is sent before the update, device 0 takes it as it is after"
    assert refused(broken, message)[0] in (0, device)


def test_a_hand_over_without_the_senders_update_is_refused() -> None:
    built = program("late")
    broken = without(built, *find(built, UpdateOrSkip, slab=6, on=2)[:2])
    assert refused(broken, "stale state: slab 6 is sent before the update")[0] in (0, 2)


def test_a_handed_over_slab_that_is_updated_again_is_refused() -> None:
    built = program("late")
    broken = edited(built, 0, lambda steps: steps.append(UpdateOrSkip(6)))
    assert refused(broken, "device 0 does not hold slab 6") == (0, end(built, 0))


def test_an_early_copy_taken_after_the_global_norm_is_refused() -> None:
    built = program()
    device, step, _ = find(built, RecvState, slab=6)
    broken = moved(built, device, step, norm(built, device))
    # It is then no joiner: the group and its update are wrong, or the state is
    # (or another state comes in its place).
    message = "wrong group|does not hold slab 6|stale state|out of order"
    assert refused(broken, message)[0] in (0, 2)


def test_a_hand_over_taken_before_the_global_norm_is_refused() -> None:
    built = program("late")
    device, step, _ = find(built, RecvState, slab=6)
    # A joiner must reduce and update, which this program does not let it do.
    assert refused(moved(built, device, step, 0), "wrong group|slab 6 is not reduced|one holder")


# -- state messages ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["early", "late"])
def test_a_missing_send_of_state_is_refused(way: str) -> None:
    built = program(way)
    device, step, _ = find(built, SendState, slab=6)
    broken = without(built, device, step)
    assert refused(broken, "expects slab 6")[0] in (0, 2)


def test_a_missing_last_send_is_refused_at_what_waits_for_it() -> None:
    built = program()
    device, step, send = find(built, SendState, -1, peer=3)
    broken = without(built, device, step)
    message = f"waits for devices {device} to send the state of slab 3, which never happens"
    assert send.slab == 3
    assert refused(broken, message) == find(broken, UpdateOrSkip, slab=send.slab, on=3)[:2]


def test_a_missing_last_hand_over_never_arrives() -> None:
    built = program("late")
    device, step, send = find(built, SendState, -1, peer=3)
    broken = without(built, device, step)
    message = f"at the end slab {send.slab} never arrives, which the next plan needs"
    assert refused(broken, message) == (3, end(built, 3))


@pytest.mark.parametrize("way", ["early", "late"])
def test_a_missing_receive_of_state_is_refused(way: str) -> None:
    built = program(way)
    device, step, receive = find(built, RecvState, -1, on=3)
    message = {
        "early": "wrong group|does not hold slab 3",
        "late": "waits for devices 3 to take the state of slab 3, which never happens",
    }[way]
    assert receive.slab == 3
    assert refused(without(built, device, step), message)[0] in (0, 1, 3)


@pytest.mark.parametrize("way", ["early", "late"])
def test_an_extra_send_of_state_is_refused_at_the_drop_that_waits_for_it(way: str) -> None:
    built = program(way)
    device, step, send = find(built, SendState, -1, peer=3)
    broken = inserted(built, device, step + 1, send)
    message = f"waits for devices 3 to take the state of slab {send.slab}, which never happens"
    assert refused(broken, message) == find(broken, Drop, slab=send.slab, on=device)[:2]


def test_an_extra_send_of_a_slab_that_stays_is_refused() -> None:
    built = program("late")
    broken = edited(built, 2, lambda steps: steps.append(SendState(4, 3)))
    message = "the state of slab 4 is sent to device 3, which never receives it"
    assert refused(broken, message) == (2, end(broken, 2))


def test_an_update_waits_until_what_was_sent_early_is_taken() -> None:
    built = program()
    broken = inserted(built, 2, 0, SendState(4, 3))
    message = "waits for devices 3 to take the state of slab 4, which never happens"
    assert refused(broken, message) == find(broken, UpdateOrSkip, slab=4, on=2)[:2]


def test_two_devices_that_drop_before_they_make_room_are_refused_as_a_deadlock() -> None:
    swap = transition(Plan.parse("0:4@0 | 4:8@1"), Plan.parse("0:4@1 | 4:8@0"), LAYERS, late=None)
    costs = OpCosts.scaled([4, 4], TOKENS)
    built = build(swap.plan, LAYERS, costs, TOKENS, world_size=2, switch=swap).program
    validate(built, LAYERS)
    # All stay as they are, but what is received comes after what is dropped.
    broken = replace(
        built,
        instructions=tuple(
            tuple(sorted(steps, key=lambda s: isinstance(s, RecvState)))
            for steps in built.instructions
        ),
    )
    device, step = refused(broken, "deadlock")
    assert (device, broken.instructions[device][step]) in ((0, Drop(0)), (1, Drop(4)))
    with pytest.raises(ProgramError) as caught:
        validate(broken, LAYERS)
    assert "waits for devices 1 to take the state of slab 0\n" in str(caught.value)
    assert "waits for devices 0 to take the state of slab 4\n" in str(caught.value)


@pytest.mark.parametrize("way", ["early", "late"])
def test_an_extra_receive_of_state_is_refused(way: str) -> None:
    built = program(way)
    device, step, receive = find(built, RecvState, slab=6)
    broken = inserted(built, device, step + 1, receive)
    assert refused(broken, "device 0 has slab 6 already") == (device, step + 1)


@pytest.mark.parametrize("way", ["early", "late"])
@pytest.mark.parametrize("kind", [SendState, RecvState])
def test_swapped_messages_of_one_pair_are_refused(
    way: str, kind: type[SendState | RecvState]
) -> None:
    built = program(way)
    first = find(built, SendState, 0, peer=0, on=2) if kind is SendState else find(
        built, RecvState, 0, on=0
    )  # fmt: skip
    device, step, one = first
    two = built.instructions[device][step + 1]
    assert isinstance(two, kind)
    assert one.peer == two.peer
    broken = moved(built, device, step, step + 1)
    slabs = sorted((one.slab, two.slab))
    message = f"out of order: device 2 sends slab ({slabs[0]}|{slabs[1]}), device 0 expects slab"
    assert refused(broken, message)[0] in (0, 2)


def test_a_receive_of_a_slab_that_is_held_is_refused() -> None:
    built = program()
    broken = inserted(built, 1, 0, RecvState(0, 0))
    assert refused(broken, "device 1 has slab 0 already") == (1, 0)


def test_a_receive_of_a_slab_that_the_next_plan_does_not_give_is_refused() -> None:
    built = program()
    broken = inserted(built, 3, 0, RecvState(5, 2))
    assert refused(broken, "the next plan does not give slab 5 to device 3") == (3, 0)


def test_a_send_of_a_slab_that_is_not_held_is_refused() -> None:
    built = program()
    broken = inserted(built, 1, 0, SendState(5, 3))
    assert refused(broken, "device 1 does not have slab 5") == (1, 0)


def test_a_send_of_a_slab_that_is_still_on_its_way_is_refused() -> None:
    built = program("late")
    at = end(built, 3)
    slow = moved(built, 0, find(built, SendState, 0, on=0, peer=3)[1], end(built, 0) - 1)
    broken = inserted(slow, 3, at, SendState(2, 0))
    assert refused(broken, "has no state of slab 2 to send") == (3, at)


@pytest.mark.parametrize("peer", [-1, 3, 4])
@pytest.mark.parametrize("kind", [SendState, RecvState])
def test_a_state_to_itself_or_to_nobody_is_refused(
    peer: int, kind: type[SendState | RecvState]
) -> None:
    built = program()
    broken = inserted(built, 3, norm(built, 3), kind(2, peer))
    found = refused(broken, "a state goes to another of the 4 devices")
    assert found == (3, norm(built, 3))


def test_a_receive_from_another_device_than_the_sender_is_refused() -> None:
    built = program()
    device, step, receive = find(built, RecvState, slab=6)
    broken = put(built, device, step, replace(receive, peer=1))
    assert refused(broken, "device 2 sends slab 6, device 0 expects slab 7")[0] in (0, 2)
    device, step, receive = find(built, RecvState, slab=7)
    broken = put(built, device, step, replace(receive, peer=1))
    message = "waits for devices 1 to send the state of slab 7, which never happens"
    assert refused(broken, message)[0] == 0


@pytest.mark.parametrize("stray", [SendState(0, 3), RecvState(0, 1), Drop(0)])
def test_a_switch_in_a_program_without_a_next_plan_is_refused(stray: Instruction) -> None:
    costs = OpCosts.scaled([4, 4], TOKENS)
    built = build(BEFORE, LAYERS, costs, TOKENS, world_size=4).program
    device = 3 if isinstance(stray, RecvState) else 0
    at = norm(built, device) + isinstance(stray, Drop)
    broken = inserted(built, device, at, stray)
    message = "a switch in a program without a next plan|wrong group"
    assert refused(broken, message)[0] in (0, 1, device)
    quiet = build(Plan.parse("0:8@0"), LAYERS, OpCosts.scaled([8], TOKENS), TOKENS, world_size=4)
    at = norm(quiet.program, 0) + isinstance(stray, Drop)
    if not isinstance(stray, RecvState):
        broken = inserted(quiet.program, 0, at, stray)
        assert refused(broken, "a switch in a program without a next plan") == (0, at)


def test_a_program_that_only_claims_to_switch_is_refused() -> None:
    built = build(BEFORE, LAYERS, OpCosts.scaled([4, 4], TOKENS), TOKENS, world_size=4).program
    broken = replace(built, next_plan=AFTER)
    assert refused(broken, "at the end slab 2 is not there, which the next plan needs")[0] == 3


def test_a_next_plan_of_another_model_or_world_is_refused() -> None:
    built = program()
    with pytest.raises(ProgramError, match="covers 6 units, the model has 8"):
        validate(replace(built, next_plan=Plan.parse("0:6@0")), LAYERS)
    with pytest.raises(ProgramError, match="names device 7, but there are 4 workers"):
        validate(replace(built, next_plan=Plan.parse("0:8@7")), LAYERS)


def test_an_evaluation_that_switches_is_refused() -> None:
    costs = OpCosts.scaled([4, 4], TOKENS)
    quiet = build(BEFORE, LAYERS, costs, TOKENS, world_size=4, forward_only=True).program
    validate(quiet, LAYERS, forward_only=True)
    with pytest.raises(ProgramError, match="an evaluation does not switch"):
        validate(replace(quiet, next_plan=AFTER), LAYERS, forward_only=True)


def test_a_forward_on_a_joiner_waits_for_its_state() -> None:
    # Not routed to it: refused for that reason, before the state is asked for.
    built = program()
    broken = inserted(built, 3, 0, Forward(0, 0))
    assert refused(broken, "device 3 does not hold stage 0") == (3, 0)


# -- any valid switch, broken at random --------------------------------------------------------

SWITCHING = (SendState, RecvState, Drop)


def break_the_switch(rng: random.Random, built: Program) -> tuple[str, Program]:
    """One change to a switch that makes any program wrong, wherever it is made."""
    places = [
        (device, step)
        for device, steps in enumerate(built.instructions)
        for step, instruction in enumerate(steps)
        if isinstance(instruction, SWITCHING)
    ]
    device, step = rng.choice(places)
    steps = built.instructions[device]
    instruction = steps[step]
    at = steps.index(GlobalNorm())
    kind = type(instruction).__name__
    changes = ["gone", "twice", "other slab"]
    if isinstance(instruction, Drop):
        changes.append("early")
    if isinstance(instruction, SendState | RecvState):
        changes.append("other peer")
        if step < at or isinstance(instruction, RecvState):
            changes.append("other side of the norm")
    change = rng.choice(changes)
    if change == "gone":
        broken = without(built, device, step)
    elif change == "twice":
        broken = inserted(built, device, step + 1, instruction)
    elif change == "other slab":
        assert isinstance(instruction, SWITCHING)
        slab = rng.choice([s for s in range(-1, 40) if s != instruction.slab])
        broken = put(built, device, step, replace(instruction, slab=slab))
    elif change == "early":
        broken = moved(built, device, step, rng.randint(0, at))
    elif change == "other peer":
        assert isinstance(instruction, SendState | RecvState)
        others = [d for d in range(-1, len(built.instructions) + 1) if d != instruction.peer]
        broken = put(built, device, step, replace(instruction, peer=rng.choice(others)))
    elif step < at:
        broken = moved(built, device, step, len(steps) - 1)
    else:
        broken = moved(built, device, step, rng.randint(0, at))
    return f"{kind}: {change}", broken


def test_a_switch_broken_anywhere_is_refused(count: Callable[[int, int], int]) -> None:
    changes = set()
    for seed in range(count(200, 5000)):
        drawn = random_switch(seed, devices=6, batches=8)
        if not drawn.switch.moves and not any(drawn.switch.drops):
            continue
        built = drawn.build()
        change, broken = break_the_switch(random.Random(seed), built)
        changes.add(change)
        try:
            validate(broken, drawn.layers)
        except ProgramError as error:
            assert 0 <= error.device < drawn.case.world_size, (seed, change)
            assert f"device {error.device}, step {error.step} " in str(error)
        else:
            raise AssertionError(f"seed {seed}, {change}: accepted")
    assert len(changes) == 14
