"""What the executor of one process does to weights is what PyTorch's own AdamW does."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.blocks import decays
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.plan import Plan
from megatron_flex.programs import build_program
from megatron_flex.runtime.executor import Executor, StepInputs, StepResult
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.world import World
from megatron_flex.schedule.part import part_of
from tests.unit.model.support import build_model, make_batch, make_bert, make_config, run
from tests.unit.model.support import named_parameters as by_name

CPU = torch.device("cpu")
ADAM = OptimizerConfig(adam_eps=1e-4, clip_grad=0.5)
STEP = StepSize(learning_rate=1e-2, weight_decay=0.1)
LENGTHS = ((5, 9), (20, 3, 7), (11,))
"""Samples of each micro-batch."""


def batches(config: ModelConfig, iteration: int) -> list[PackedBatch]:
    """The micro-batches of an iteration; their samples are numbered through."""
    found, first = [], 0
    for lengths in LENGTHS:
        samples = range(first, first + len(lengths))
        found.append(make_batch(lengths, config, seed=iteration, samples=samples))
        first += len(lengths)
    return found


def denominators(config: ModelConfig, packed: list[PackedBatch]) -> tuple[int, ...]:
    """Targets of all micro-batches; far fewer for the second loss than for the first."""
    targets = sum(int(b.loss_mask.sum()) for b in packed if b.loss_mask is not None)
    return (targets, sum(map(len, LENGTHS))) if config.binary_head else (targets,)


class Worker:
    def __init__(self, config: ModelConfig, exact: bool = False) -> None:
        self.config = config
        self.plan = Plan.parse(f"0:{config.layers.num_units}@0")
        world = World(0, 1, CPU, timedelta(seconds=10))
        self.holdings = Holdings(config, self.plan, 0, CPU, exact=exact)
        self.executor = Executor(world, self.holdings, ADAM)

    def run(
        self, packed: list[PackedBatch], totals: tuple[int, ...], *, count_zeros: bool = False
    ) -> StepResult:
        parts = [MicroBatch(tuple(Slice.all_of(n, n) for n in b.lengths)) for b in packed]
        program = build_program(self.config, self.plan, parts, 1)
        inputs = StepInputs(lambda m, *_: packed[m], totals, STEP, count_zeros=count_zeros)
        return self.executor.run(part_of(program, 0), inputs)


@pytest.mark.parametrize(
    "config",
    [make_config(), make_config(untie_embeddings_and_output_weights=True), make_bert()],
    ids=["gpt", "untied", "bert"],
)
def test_iterations_are_those_of_autograd_and_adamw(config: ModelConfig) -> None:
    worker, blocks = Worker(config), build_model(config)
    named = dict(by_name(blocks))
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in named.items():
        groups[decays(name, parameter.shape)].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": STEP.weight_decay},
         {"params": groups[False], "weight_decay": 0.0}],
        lr=STEP.learning_rate, betas=(ADAM.adam_beta1, ADAM.adam_beta2), eps=ADAM.adam_eps,
    )  # fmt: skip
    for iteration in range(3):
        packed = batches(config, iteration)
        totals = denominators(config, packed)
        result = worker.run(packed, totals, count_zeros=True)
        losses = torch.stack([run(blocks, b) for b in packed]).sum(0) / torch.tensor(totals)
        optimizer.zero_grad()
        losses.sum().backward()
        zeros = sum(int((p.grad == 0).sum()) for p in named.values() if p.grad is not None)
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), ADAM.clip_grad)
        optimizer.step()
        assert result.losses == pytest.approx(losses.tolist(), rel=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert norm > ADAM.clip_grad
        # Whether the least of them are zero hangs on the order of their sums.
        assert result.zeros == pytest.approx(zeros, abs=2)
        assert not result.skipped
    state = worker.holdings.named_state(owned=True, optimizer=False)
    assert state.keys() == named.keys()
    for name, parameter in named.items():
        close = torch.dist(state[name], parameter) / parameter.norm().clamp(min=1e-3)
        assert close < 1e-4, name
    assert worker.holdings.updates == 3


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("what", ["no target", "not finite"])
def test_an_iteration_that_cannot_be_used_changes_nothing(what: str, exact: bool) -> None:
    config = make_config()
    worker, other = Worker(config, exact), Worker(config, exact)
    packed = batches(config, 0)
    spoilt = [replace(b, loss_mask=torch.zeros(b.num_tokens)) for b in packed]
    totals: tuple[int, ...] = (0,)
    if what == "not finite":
        spoilt = [replace(b, loss_mask=torch.full((b.num_tokens,), torch.nan)) for b in packed]
        totals = denominators(config, packed)
    result = worker.run(spoilt, totals)
    assert result.skipped
    assert result.finite is (what == "no target")
    assert worker.holdings.updates == 0
    for one in (worker, other):
        assert not one.run(packed, denominators(config, packed)).skipped
    state = other.holdings.named_state(owned=True)
    for name, tensor in worker.holdings.named_state(owned=True).items():
        assert torch.equal(tensor, state[name]), name
