"""Native lists and verdicts are those of plain Python, which says what the rules are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.compact import Lists
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.instructions import (
    NAMES,
    Compute,
    Instruction,
    Program,
    ReduceGradient,
)
from megatron_flex.schedule.list_scheduler import POLICIES, Schedule
from megatron_flex.schedule.validate import ProgramError, validate
from tests.oracles import emit as emit_oracle
from tests.oracles import validate as validate_oracle
from tests.unit.schedule.building import build
from tests.unit.schedule.strategies import random_case
from tests.unit.schedule.switches import edited, moved, random_switch, without


def drawn(
    seed: int, devices: int = 8, batches: int = 16
) -> tuple[Schedule, LayerList, Program, bool]:
    """A random schedule and its program by the oracle; whether it only runs forward.

    Without a switch, with one, with sharded states that are cut anew, or an evaluation.
    """
    way = random.Random(seed).choice(["keep", "switch", "sharded", "evaluate"])
    if way in ("keep", "evaluate"):
        case = random_case(seed, devices, batches)
        built = case.build(forward_only=way == "evaluate")
        switch, layers, world = None, case.layers, case.world_size
    else:
        both = random_switch(seed, devices, batches, sharded=way == "sharded")
        built, switch = both.schedule(), both.switch
        layers, world = both.layers, both.case.world_size
    placement, tokens = built.timeline.placement, built.program.tokens
    expected = emit_oracle.emit(placement, layers, tokens, world, switch)
    return built, layers, expected, way == "evaluate"


def test_lists_are_those_of_the_oracle(count: Callable[[int, int], int]) -> None:
    for seed in range(count(200, 5000)):
        built, _, expected, _ = drawn(seed)
        assert built.program == expected, f"seed {seed}"
        words = Lists.of(expected.instructions, expected.tokens).words
        assert np.array_equal(Lists.of(built.program.instructions, ()).words, words), f"seed {seed}"


def verdict(
    check: Callable[..., None], program: Program, layers: LayerList, forward_only: bool
) -> tuple[str, int, int]:
    """What a validator says; the steps that it shows included."""
    try:
        check(program, layers, forward_only=forward_only)
    except ProgramError as error:
        return str(error), error.device, error.step
    return "accepted", -1, -1


def broken(rng: random.Random, built: Program) -> Program:
    """The program with one to three changes, of which some do no harm."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        device = rng.choice([d for d, steps in enumerate(built.instructions) if len(steps)])
        steps = built.instructions[device]
        step = rng.randrange(len(steps))
        way = rng.choice(["drop", "double", "move", "swap", "number", "kind", "elsewhere"])
        other = rng.randrange(len(built.instructions))
        if way == "drop":
            built = without(built, device, step)
        elif way == "double":
            built = edited(built, device, _inserter(steps[step], rng.randint(step, len(steps))))
        elif way == "move":
            built = moved(built, device, step, rng.randrange(len(steps)))
        elif way == "swap":
            to = rng.randrange(len(steps))
            built = edited(built, device, _swapper(step, to))
        elif way == "elsewhere":
            at = rng.randrange(len(built.instructions[other]) + 1)
            built = edited(without(built, device, step), other, _inserter(steps[step], at))
        else:
            change = _numbered if way == "number" else _of_another_kind
            built = edited(built, device, _setter(step, change(rng, steps[step])))
    return built


def _inserter(what: Instruction, at: int) -> Callable[[list[Instruction]], None]:
    return lambda steps: steps.insert(at, what)


def _setter(step: int, what: Instruction) -> Callable[[list[Instruction]], None]:
    return lambda steps: steps.__setitem__(step, what)


def _swapper(a: int, b: int) -> Callable[[list[Instruction]], None]:
    def swap(steps: list[Instruction]) -> None:
        steps[a], steps[b] = steps[b], steps[a]

    return swap


def _numbered(rng: random.Random, op: Instruction) -> Instruction:
    """With another number in one field."""
    names = [n for n in ("micro_batch", "stage", "under_way", "peer", "tokens", "slab", "start",
             "stop") if hasattr(op, n)]  # fmt: skip
    if isinstance(op, ReduceGradient) and rng.random() < 0.5:
        return replace(op, group=tuple(sorted(rng.sample(range(9), rng.randint(1, 4)))))
    if not names:
        return op
    name = rng.choice(names)
    value = getattr(op, name) + rng.choice([-32, -1, 1, 2, 32])
    return replace(op, **{name: max(0, value) if name == "under_way" else value})


def _of_another_kind(rng: random.Random, op: Instruction) -> Instruction:
    """Another instruction with the same fields."""
    names = [field.name for field in fields(op)]
    kinds = [c for c in NAMES.values() if [field.name for field in fields(c)] == names]
    return rng.choice(kinds)(**{name: getattr(op, name) for name in names})


def test_verdicts_are_those_of_the_oracle(count: Callable[[int, int], int]) -> None:
    refused = 0
    for seed in range(count(200, 5000)):
        built, layers, expected, forward_only = drawn(seed, devices=6, batches=8)
        validate(built.program, layers, forward_only=forward_only)
        validate_oracle.validate(expected, layers, forward_only=forward_only)
        rng = random.Random(seed)
        for _ in range(4):
            wrong = broken(rng, expected)
            native = verdict(validate, wrong, layers, forward_only)
            assert native == verdict(validate_oracle.validate, wrong, layers, forward_only), (
                f"seed {seed}"
            )
            refused += native[0] != "accepted"
    assert refused > 400


def test_waits_for_messages_to_be_taken_that_close_a_circle_are_refused() -> None:
    plan, layers = Plan.parse("0:2@0 | 2:5@1 | 5:8@0"), LayerList(3, True)
    costs, tokens = OpCosts.uniform(3, 16), (10,) * 16
    given = build(plan, layers, costs, tokens, POLICIES["gpipe"], world_size=2).program
    validate(given, layers)
    impatient = [
        tuple(replace(i, under_way=0) if isinstance(i, Compute) else i for i in steps)
        for steps in given.instructions
    ]
    wrong = replace(given, instructions=tuple(impatient))
    text, device, step = verdict(validate, wrong, layers, False)
    assert (
        "device 0 at step 86 (Backward micro_batch=11 stage=2) waits for device 1 to take" in text
    )
    assert (text, device, step) == verdict(validate_oracle.validate, wrong, layers, False)
    assert (device, step) == (0, 86)


def test_an_evaluation_is_no_iteration_to_either() -> None:
    case = random_case(3)
    program = case.build(forward_only=True).program
    with pytest.raises(ProgramError) as native:
        validate(program, case.layers)
    with pytest.raises(ProgramError) as python:
        validate_oracle.validate(program, case.layers)
    assert str(native.value) == str(python.value)
