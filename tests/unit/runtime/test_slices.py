"""Programs with chains: a worker gives what it gives for whole samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.plan import Plan
from megatron_flex.programs import build_program
from megatron_flex.runtime.executor import Executor, StepInputs, StepResult
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.world import World
from megatron_flex.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Program,
)
from megatron_flex.schedule.part import part_of
from tests.close import assert_close, assert_numbers_close
from tests.unit.model.slices import packed, two_chains
from tests.unit.model.support import make_config

CPU = torch.device("cpu")
CONFIG = make_config(
    num_query_groups=2, position_embedding_type="rope", swiglu=True, normalization="RMSNorm",
    add_bias_linear=False, attention_dropout=0.1, hidden_dropout=0.1,
)  # fmt: skip
UNITS = CONFIG.layers.num_units
WHOLE, TWICE = f"0:{UNITS}@0", f"0:3@0 | 3:{UNITS}@0"
LENGTHS = (90, 61, 9, 5, 30)
ADAM = OptimizerConfig(adam_eps=1e-4)
Parts = Sequence[Sequence[Slice]]


def uncut() -> Parts:
    return [[Slice.all_of(s, n)] for s, n in enumerate(LENGTHS)]


def chains_of(parts: Parts) -> tuple[tuple[int, ...], ...]:
    found: dict[int, list[int]] = {}
    for number, slices in enumerate(parts):
        if not slices[0].whole:
            found.setdefault(slices[0].sample, []).append(number)
    return tuple(map(tuple, found.values()))


def fused(stages: int, parts: Parts) -> list[Compute]:
    """All forwards, then all backwards in reverse."""
    forwards = [Forward(m, s) for m in range(len(parts)) for s in range(stages)]
    return [*forwards, *(Backward(o.micro_batch, o.stage) for o in reversed(forwards))]


def split(stages: int, parts: Parts) -> list[Compute]:
    """The same in halves, weights in the order of the micro-batches."""
    ops = fused(stages, parts)
    first = [BackwardInput(o.micro_batch, o.stage) if isinstance(o, Backward) else o for o in ops]
    return [*first, *(BackwardWeight(m, s) for m in range(len(parts)) for s in range(stages))]


def by_chain(stages: int, parts: Parts) -> list[Compute]:
    """One chain after the other."""
    found: list[Compute] = []
    for chain in chains_of(parts):
        for s in range(stages):
            found += [Forward(m, s) for m in chain]
        for s in reversed(range(stages)):
            found += [Backward(m, s) for m in reversed(chain)]
    return found


def evaluation(stages: int, parts: Parts) -> list[Compute]:
    return [Forward(m, s) for s in range(stages) for m in range(len(parts))]


def program_of(
    config: ModelConfig, plan: Plan, parts: Parts, order: list[Compute], *, training: bool
) -> Program:
    batches = [MicroBatch(tuple(slices)) for slices in parts]
    wholes = [MicroBatch((Slice.all_of(0, b.tokens),)) for b in batches]
    built = build_program(config, plan, wholes, 1, forward_only=not training)
    rest = tuple(i for i in built.instructions[0] if not isinstance(i, Compute))
    instructions: tuple[Instruction, ...] = (*order, *rest)
    return replace(built, instructions=(instructions,), chains=chains_of(parts))


def run(
    parts: Parts,
    make: Callable[[int, Parts], list[Compute]] = fused,
    plan: str = WHOLE,
    exact: bool = False,
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    parsed, training = Plan.parse(plan), make is not evaluation
    holdings = Holdings(CONFIG, parsed, 0, CPU, exact=exact)
    executor = Executor(World(0, 1, CPU, timedelta(seconds=10)), holdings, ADAM)
    order = make(len(parsed.stages), parts)
    program = program_of(CONFIG, parsed, parts, order, training=training)
    tensors: list[PackedBatch] = [packed(slices, CONFIG) for slices in parts]
    step = StepSize(1e-2, 0.1) if training else None
    inputs = StepInputs(lambda m, *_: tensors[m], (sum(LENGTHS),), step)
    result = executor.run(part_of(program, 0), inputs)
    return result, holdings.named_state(owned=True, optimizer=True)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (fused, WHOLE),
        (split, WHOLE),
        (by_chain, TWICE),
        (split, TWICE),
        (fused, f"{WHOLE} ; recompute 0-{UNITS - 1}"),
        (split, f"{TWICE} ; recompute 1-2"),
        (fused, f"{WHOLE} ; activations 1-{UNITS - 2}"),
        (split, f"{TWICE} ; activations 1,3"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_worker_gives_for_slices_what_it_gives_for_whole_samples(
    make: Callable[[int, Parts], list[Compute]], plan: str, exact: bool
) -> None:
    expected, state = run(uncut(), exact=exact)
    result, found = run(two_chains(LENGTHS, 16), make, plan, exact)
    assert_numbers_close(result.losses, expected.losses, 1e-6)
    assert_numbers_close(result.grad_norm, expected.grad_norm, 1e-5)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert_close(found[name], tensor, 2e-5, name, least=1e-3)


def test_an_evaluation_in_slices() -> None:
    for plan in (WHOLE, TWICE):
        result, _ = run(two_chains(LENGTHS, 16), evaluation, plan)
        assert_numbers_close(result.losses, run(uncut(), evaluation)[0].losses, 1e-6)


def test_what_is_out_of_order_is_refused_by_stage_micro_batch_and_sample() -> None:
    parts = two_chains(LENGTHS, 40)

    def late(stages: int, parts: Parts) -> list[Compute]:
        found = fused(stages, parts)
        found[0], found[2] = found[2], found[0]
        return found

    with pytest.raises(RuntimeError, match=r"stage 0, micro-batch 2: forward of .* of sample 0"):
        run(parts, late)

    def early(stages: int, parts: Parts) -> list[Compute]:
        found = split(stages, parts)
        place = [i for i, op in enumerate(found) if isinstance(op, BackwardInput)]
        first, second = (
            next(i for i in place if found[i].micro_batch == m) for m in (4, 2)
        )  # both of the first sample
        found[first], found[second] = found[second], found[first]
        return found

    with pytest.raises(RuntimeError, match=r"stage 0, micro-batch 2: backward of .* of sample 0"):
        run(parts, early)

    def unfinished(stages: int, parts: Parts) -> list[Compute]:
        return fused(stages, parts)[:-1]

    with pytest.raises(RuntimeError, match="stage 0: not all slices of sample 0 ran backward"):
        run(parts, unfinished)
