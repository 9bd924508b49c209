"""The validator accepts what the scheduler writes and names the step of every broken program."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import event, given, settings

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    GlobalNorm,
    Instruction,
    Program,
    RecvActivation,
    RecvGradient,
    ReduceGradient,
    SendActivation,
    SendGradient,
    SquaredNorm,
    Transfer,
    UpdateOrSkip,
)
from megatron_flex.schedule.list_scheduler import policy
from megatron_flex.schedule.validate import ProgramError, validate
from tests.unit.schedule.building import build
from tests.unit.schedule.strategies import SEEDS, Case, cases, random_case
from tests.unit.schedule.switches import edited, find, moved, put, without

LAYERS = LayerList(3, tied=True)
#: Uneven degrees, a V of stages 0 and 2, tied embeddings on devices 0, 1 and 3, device 4 idle.
PLAN = Plan.parse("0:2@0,1 | 2:4@2 | 4:6@0,1 | 6:8@3")
TOKENS = (100, 250, 60, 180)


def program(name: str = "zb", plan: Plan = PLAN) -> Program:
    costs = OpCosts.scaled([s.stop - s.start for s in plan.stages], TOKENS)
    built = build(plan, LAYERS, costs, TOKENS, policy(name), world_size=5).program
    validate(built, LAYERS)
    return built


def doubled(given: Program, device: int, step: int) -> Program:
    return edited(given, device, lambda steps: steps.insert(step + 1, steps[step]))


def _put_first(instruction: Instruction, steps: list[Instruction]) -> None:
    steps.insert(0, instruction)


def refused(broken: Program, message: str) -> ProgramError:
    with pytest.raises(ProgramError, match=message) as caught:
        validate(broken, LAYERS)
    return caught.value


@given(cases(devices=16, batches=64))
def test_every_generated_program_is_accepted(case: Case) -> None:
    validate(case.build().program, case.layers)
    validate(case.build(forward_only=True).program, case.layers, forward_only=True)


@pytest.mark.soak
def test_five_thousand_generated_programs_are_accepted() -> None:
    for seed in range(5000):
        case = random_case(seed)
        validate(case.build().program, case.layers)


# -- one test for each way of being wrong ------------------------------------------------------


def test_swapped_sends_are_refused_with_device_and_step_of_the_receive() -> None:
    built = program()
    a = find(built, SendActivation, 0, stage=1, peer=0)
    b = find(built, SendActivation, 1, stage=1, peer=0)
    swapped = put(put(built, a[0], a[1], replace(b[2])), b[0], b[1], replace(a[2]))
    # The later message would now be sent before it is computed.
    error = refused(swapped, "sent before it is computed")
    assert (error.device, error.step) == a[:2]


def test_receives_in_another_order_than_the_sends_are_refused() -> None:
    built = program()
    device, first, one = find(built, RecvActivation, 0, stage=2)
    _, second, two = find(built, RecvActivation, 1, stage=2, peer=one.peer)
    if one.peer != two.peer:
        pytest.fail("the plan must send two messages over this pair")
    broken = put(put(built, device, first, two), device, second, one)
    error = refused(broken, "out of order: the next message from device")
    assert (error.device, error.step) == (device, first)
    assert f"device {device}, step {first} " in str(error)
    assert f"[recvA{two.micro_batch}.2<{two.peer}]" in str(error)


def test_a_receive_smaller_than_its_message_is_refused() -> None:
    built = program()
    device, step, receive = find(built, RecvActivation, 1)
    broken = put(built, device, step, replace(receive, tokens=receive.tokens - 1))
    error = refused(broken, "the receive is smaller than the message")
    assert (error.device, error.step) == (device, step)


def test_a_receive_larger_than_its_message_is_refused() -> None:
    built = program()
    device, step, receive = find(built, RecvGradient, 1)
    broken = put(built, device, step, replace(receive, tokens=receive.tokens + 1))
    error = refused(broken, "the receive is larger than the message")
    assert (error.device, error.step) == (device, step)


def test_a_message_of_another_size_than_its_micro_batch_is_refused() -> None:
    built = program()
    device, step, send = find(built, SendGradient)
    error = refused(put(built, device, step, replace(send, tokens=7)), "the message has 7 tokens")
    assert (error.device, error.step) == (device, step)


def test_a_missing_send_is_refused_at_the_receive_that_waits_for_it() -> None:
    built = program()
    device, step, send = find(built, SendGradient, -1, peer=2)
    receive = find(built, RecvGradient, 0, stage=send.stage, micro_batch=send.micro_batch)
    error = refused(without(built, device, step), "waits for device 1, which never sends it")
    assert (error.device, error.step) == receive[:2]


def test_a_message_that_nobody_receives_is_refused() -> None:
    built = program("zb", Plan.parse("0:4@0 | 4:8@1"))
    device, step, receive = find(built, RecvGradient, -1)
    error = refused(without(built, device, step), "the gradient from stage 1")
    assert built.instructions[error.device][error.step + 1] == BackwardInput(receive.micro_batch, 0)


def test_a_message_sent_twice_is_refused() -> None:
    built = program()
    device, step, _ = find(built, SendActivation)
    error = refused(doubled(built, device, step), "sent a second time")
    assert (error.device, error.step) == (device, step + 1)


def test_a_message_to_the_wrong_device_is_refused() -> None:
    built = program()
    device, step, send = find(built, SendActivation, stage=2)
    error = refused(put(built, device, step, replace(send, peer=4)), "by the routing")
    assert (error.device, error.step) == (device, step)


def test_a_message_from_the_wrong_device_is_refused() -> None:
    built = program()
    device, step, receive = find(built, RecvActivation)
    error = refused(put(built, device, step, replace(receive, peer=4)), "by the routing")
    assert (error.device, error.step) == (device, step)


def test_a_message_between_stages_of_one_device_is_refused() -> None:
    plan = Plan.parse("0:2@0 | 2:6@1 | 6:7@1 | 7:8@0")
    built = program(plan=plan)
    device, step, forward = find(built, Forward, stage=1)
    send = SendActivation(forward.micro_batch, 1, device, TOKENS[forward.micro_batch])
    broken = edited(built, device, lambda steps: steps.insert(step + 1, send))
    assert refused(broken, "no message is needed on one device").device == device
    receive = RecvActivation(forward.micro_batch, 1, device, TOKENS[forward.micro_batch])
    broken = edited(built, device, lambda steps: steps.insert(step + 1, receive))
    assert refused(broken, "no message is needed on one device").device == device


def test_an_activation_past_the_last_stage_is_refused() -> None:
    built = program()
    device, step, forward = find(built, Forward, stage=3)
    send = SendActivation(forward.micro_batch, 3, 0, TOKENS[forward.micro_batch])
    broken = edited(built, device, lambda steps: steps.insert(step + 1, send))
    assert refused(broken, "no stage takes what stage 3 sends").step == step + 1


def test_two_devices_that_wait_for_each_other_are_refused_as_a_deadlock() -> None:
    built = program("1f1b", Plan.parse("0:4@0 | 4:8@1"))
    # Device 0 wants a gradient before it sends the activation that it belongs to.
    device, step, receive = find(built, RecvGradient, 0)
    send = find(built, SendActivation, 0, micro_batch=receive.micro_batch)
    broken = moved(built, device, step, send[1])
    error = refused(broken, "deadlock")
    assert (error.device, error.step) == (0, send[1])
    assert "device 0 at step" in str(error)
    assert "device 1 at step" in str(error)
    assert "waits for device 1" in str(error)


@pytest.mark.parametrize("kind", [Forward, Backward, BackwardInput, BackwardWeight])
def test_a_missing_computation_is_refused(kind: type[Instruction]) -> None:
    built = program("1f1b" if kind is Backward else "zb")
    device, step, op = find(built, kind, -1, stage=3)
    error = refused(without(built, device, step), "before|once|not whole")
    assert error.device == device
    assert getattr(built.instructions[device][error.step + 1], "micro_batch", 3) == op.micro_batch


@pytest.mark.parametrize("kind", [Forward, Backward, BackwardInput, BackwardWeight])
def test_a_doubled_computation_is_refused(kind: type[Instruction]) -> None:
    built = program("1f1b" if kind is Backward else "zb")
    device, step, _ = find(built, kind, 1)
    error = refused(doubled(built, device, step), "second|must come once")
    assert (error.device, error.step) == (device, step + 1)


def test_a_missing_micro_batch_is_refused_at_the_global_norm() -> None:
    built = program(plan=Plan.parse("0:8@0"))
    gone = [s for s in built.instructions[0] if getattr(s, "micro_batch", -1) != 2]
    error = refused(replace(built, instructions=(tuple(gone), *built.instructions[1:])),
                    "the gradient of slab|forward of micro-batch 2")  # fmt: skip
    assert error.device == 0
    assert "micro-batch" in str(error)


def test_backward_before_forward_is_refused() -> None:
    built = program("1f1b", Plan.parse("0:4@0 | 4:8@1"))
    device, step, forward = find(built, Forward, 0, stage=1)
    after = find(built, Backward, 0, stage=1, micro_batch=forward.micro_batch)
    error = refused(moved(built, device, after[1], step), "backward before forward")
    assert (error.device, error.step) == (device, step)


def test_a_forward_before_its_input_arrives_is_refused() -> None:
    built = program()
    device, step, receive = find(built, RecvActivation, 0, stage=2)
    forward = find(built, Forward, 0, stage=3, micro_batch=receive.micro_batch)
    error = refused(moved(built, device, forward[1], step), "the output of stage 2")
    assert (error.device, error.step) == (device, step)


def test_a_forward_before_the_same_device_ran_the_stage_before_is_refused() -> None:
    built = program("1f1b", Plan.parse("0:4@0 | 4:8@0"))
    device, step, _ = find(built, Forward, 0, stage=1)
    error = refused(moved(built, device, step, 0), "the output of stage 0")
    assert (error.device, error.step) == (device, 0)


def test_a_backward_before_its_gradient_arrives_is_refused() -> None:
    built = program()
    device, step, receive = find(built, RecvGradient, 0, stage=1)
    backward = find(built, BackwardInput, 0, stage=0, micro_batch=receive.micro_batch)
    error = refused(moved(built, device, backward[1], step), "the gradient from stage 1")
    assert (error.device, error.step) == (device, step)


def test_a_weight_half_before_its_input_half_is_refused() -> None:
    built = program()
    device, step, half = find(built, BackwardInput, 0, stage=3)
    weight = find(built, BackwardWeight, 0, stage=3, micro_batch=half.micro_batch)
    error = refused(moved(built, device, weight[1], step), "the weight half")
    assert (error.device, error.step) == (device, step)


def test_a_stage_on_a_device_that_does_not_hold_it_is_refused() -> None:
    built = program()
    broken = edited(built, 3, lambda steps: steps.insert(0, Forward(0, 0)))
    error = refused(broken, "device 3 does not hold stage 0")
    assert (error.device, error.step) == (3, 0)


def test_a_micro_batch_on_a_replica_it_is_not_routed_to_is_refused() -> None:
    built = program()
    stray = built.route[0].index(0)
    broken = edited(built, 1, lambda steps: steps.insert(0, Forward(stray, 0)))
    error = refused(broken, f"micro-batch {stray} is routed to device 0")
    assert (error.device, error.step) == (1, 0)


def test_a_stage_or_micro_batch_that_is_not_there_is_refused() -> None:
    built = program()
    for stray in (Forward(0, 4), Forward(4, 0), Forward(-1, 0)):
        broken = edited(built, 0, partial(_put_first, stray))
        assert refused(broken, "there are only stages 0 to 3").step == 0


def test_a_reduction_before_the_last_backward_is_refused() -> None:
    built = program()
    device, step, reduce = find(built, ReduceGradient, -1)
    before = max(s for s, x in enumerate(built.instructions[device][:step])
                 if isinstance(x, BackwardWeight))  # fmt: skip
    error = refused(moved(built, device, step, before), f"slab {reduce.slab} is not whole")
    assert (error.device, error.step) == (device, before)


def test_a_missing_reduction_is_refused() -> None:
    built = program()
    for device in (0, 1):
        _, step, reduce = find(built, ReduceGradient, device, slab=1)
        error = refused(without(built, device, step), "slab 1 is not reduced|which lack it")
        assert error.device in (0, 1)
    both = built
    for device in (0, 1):
        steps = both.instructions[device]
        both = without(both, device, steps.index(reduce))
    error = refused(both, "slab 1 is not reduced over devices 0, 1")
    assert isinstance(both.instructions[error.device][error.step], SquaredNorm | GlobalNorm)


def test_a_doubled_reduction_is_refused() -> None:
    built = program()
    device, step, _ = find(built, ReduceGradient)
    error = refused(doubled(built, device, step), "reduced a second time|deadlock")
    assert (error.device, error.step) == (device, step + 1)


def test_a_reduction_over_the_wrong_group_is_refused() -> None:
    built = program()
    device, step, reduce = find(built, ReduceGradient, slab=LAYERS.tied_slab)
    assert reduce.group == (0, 1, 3)
    error = refused(put(built, device, step, replace(reduce, group=(0, 1))), "wrong group")
    assert (error.device, error.step) == (device, step)


def test_a_reduction_of_a_slab_with_one_holder_is_refused() -> None:
    built = program()
    broken = edited(
        built, 2, lambda steps: steps.insert(steps.index(SquaredNorm(2)), ReduceGradient(2, (2,)))
    )
    assert refused(broken, "slab 2 has one holder").device == 2


def test_reductions_in_different_orders_are_refused_as_a_deadlock() -> None:
    built = program()
    device, step, _ = find(built, ReduceGradient, 0)
    first, second = built.instructions[device][step : step + 2]
    assert isinstance(first, ReduceGradient)
    assert isinstance(second, ReduceGradient)
    assert first.group == second.group
    error = refused(moved(built, device, step, step + 1), "deadlock")
    assert "at the reduction" in str(error)
    assert error.device in first.group


def test_a_norm_counted_twice_is_refused() -> None:
    built = program()
    device, step, _ = find(built, SquaredNorm, 1)
    error = refused(doubled(built, device, step), "counted twice, first by device")
    assert (error.device, error.step) == (device, step + 1)


def test_a_norm_counted_by_two_holders_is_refused() -> None:
    built = program()
    slab = next(x.slab for x in built.instructions[0] if isinstance(x, SquaredNorm))
    broken = edited(
        built, 1, lambda steps: steps.insert(steps.index(GlobalNorm()), SquaredNorm(slab))
    )
    error = refused(broken, f"the norm of slab {slab} is counted twice")
    assert error.device in (0, 1)


def test_a_norm_that_nobody_counts_is_refused() -> None:
    built = program()
    device, step, norm = find(built, SquaredNorm, 2)
    error = refused(
        without(built, device, step), f"no device has counted the norm of slab {norm.slab}"
    )
    assert isinstance(built.instructions[error.device][-1], UpdateOrSkip | GlobalNorm)


def test_a_norm_before_its_reduction_is_refused() -> None:
    built = program()
    device, step, reduce = find(built, ReduceGradient, 0)
    norm = find(built, SquaredNorm, slab=reduce.slab)
    assert norm[0] == device
    error = refused(moved(built, device, norm[1], step), "is not reduced over devices")
    assert (error.device, error.step) == (device, step)


def test_an_update_before_the_global_norm_is_refused() -> None:
    built = program()
    device, step, _ = find(built, UpdateOrSkip)
    at = built.instructions[device].index(GlobalNorm())
    error = refused(moved(built, device, step, at), "an update before the global norm")
    assert (error.device, error.step) == (device, at)


def test_a_missing_update_is_refused_at_the_end_of_the_list() -> None:
    built = program()
    device, step, update = find(built, UpdateOrSkip, 3)
    error = refused(without(built, device, step), f"without an update of slab {update.slab}")
    assert (error.device, error.step) == (device, len(built.instructions[device]) - 1)


def test_a_doubled_update_is_refused() -> None:
    built = program()
    device, step, _ = find(built, UpdateOrSkip, 3)
    error = refused(doubled(built, device, step), "updated a second time")
    assert (error.device, error.step) == (device, step + 1)


def test_an_update_of_a_slab_that_is_not_held_is_refused() -> None:
    built = program()
    broken = edited(built, 4, lambda steps: steps.append(UpdateOrSkip(0)))
    assert refused(broken, "device 4 does not hold slab 0").device == 4
    broken = edited(built, 0, lambda steps: steps.append(UpdateOrSkip(99)))
    assert refused(broken, "there are only slabs 0 to 8").device == 0


def test_a_device_without_a_global_norm_is_refused() -> None:
    built = program()
    error = refused(without(built, 4, 0), "ends without a global norm")
    assert error.device == 4
    steps = built.instructions[3]
    error = refused(
        without(built, 3, steps.index(GlobalNorm())), "an update before the global norm"
    )
    assert error.device == 3


def test_work_after_the_global_norm_is_refused() -> None:
    built = program()
    broken = edited(built, 0, lambda steps: steps.append(GlobalNorm()))
    assert refused(broken, "only updates and a switch may follow").device == 0


def test_an_evaluation_with_a_backward_or_an_update_is_refused() -> None:
    built = program("1f1b")
    with pytest.raises(ProgramError, match="forward only"):
        validate(built, LAYERS, forward_only=True)
    costs = OpCosts.scaled([2, 2, 2, 2], TOKENS)
    quiet = build(PLAN, LAYERS, costs, TOKENS, world_size=5, forward_only=True).program
    validate(quiet, LAYERS, forward_only=True)
    with pytest.raises(ProgramError, match="backward of micro-batch"):
        validate(quiet, LAYERS)
    broken = edited(quiet, 0, lambda steps: steps.append(UpdateOrSkip(0)))
    with pytest.raises(ProgramError, match="forward only"):
        validate(broken, LAYERS, forward_only=True)


def test_a_program_of_another_model_or_world_is_refused() -> None:
    built = program()
    with pytest.raises(ProgramError, match="covers 8 units, the model has 10"):
        validate(built, LayerList(4, tied=True))
    with pytest.raises(ProgramError, match="there are 3 workers"):
        validate(replace(built, instructions=built.instructions[:3]), LAYERS)
    with pytest.raises(ProgramError, match="does not hold it"):
        validate(replace(built, route=((4, 4, 4, 4), *built.route[1:])), LAYERS)


# -- any valid program, broken at random -------------------------------------------------------


def break_somewhere(rng: random.Random, built: Program) -> tuple[str, Program]:
    """One change that makes any program wrong, wherever it is made."""
    device = rng.choice([d for d, steps in enumerate(built.instructions) if len(steps) > 1])
    steps = built.instructions[device]
    step = rng.randrange(len(steps))
    instruction = steps[step]
    choices = ["drop", "double"]
    if not isinstance(instruction, SquaredNorm):  # any one holder may count a norm
        choices.append("other device")
    if isinstance(instruction, Transfer):
        choices.append("resize")
    change = rng.choice(choices)
    if change == "drop":
        return change, without(built, device, step)
    if change == "double":
        return change, doubled(built, device, step)
    if change == "resize" and isinstance(instruction, Transfer):
        return change, put(built, device, step, replace(instruction, tokens=instruction.tokens + 1))
    other = (device + 1) % len(built.instructions)
    if other == device:
        return "drop", without(built, device, step)
    at = rng.randrange(len(built.instructions[other]) + 1)
    grown = edited(built, other, lambda steps: steps.insert(at, instruction))
    return change, without(grown, device, step)


@settings(max_examples=150)
@given(SEEDS)
def test_a_dropped_doubled_or_displaced_instruction_is_always_refused(seed: int) -> None:
    case = random_case(seed, devices=6, batches=8)
    built = case.build().program
    change, broken = break_somewhere(random.Random(seed), built)
    with pytest.raises(ProgramError) as caught:
        validate(broken, case.layers)
    event(change)
    assert 0 <= caught.value.device < case.world_size
    assert f"device {caught.value.device}, step {caught.value.step} " in str(caught.value)


@settings(max_examples=50)
@given(SEEDS)
def test_swapping_the_messages_of_one_pair_at_one_end_is_always_refused(seed: int) -> None:
    rng = random.Random(seed)
    case = random_case(seed, devices=6, batches=12)
    built = case.build().program
    pairs: dict[tuple[int, int], list[int]] = {}
    for device, steps in enumerate(built.instructions):
        for step, instruction in enumerate(steps):
            if isinstance(instruction, RecvActivation | RecvGradient):
                pairs.setdefault((device, instruction.peer), []).append(step)
    swappable = [(device, steps) for (device, _), steps in pairs.items() if len(steps) > 1]
    if not swappable:
        return
    device, steps_ = rng.choice(swappable)
    a, b = rng.sample(steps_, 2)
    one, two = built.instructions[device][a], built.instructions[device][b]
    broken = put(put(built, device, a, two), device, b, one)
    with pytest.raises(ProgramError) as caught:
        validate(broken, case.layers)
    assert caught.value.device >= 0
