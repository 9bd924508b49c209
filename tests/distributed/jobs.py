"""Training jobs that the distributed tests run on pool workers, and how results are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_flex import native
from megatron_flex.data.cut import Cut, chains_of
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.tensor_cut import cut_of, full_shape, pieces
from megatron_flex.planner.footprint import Footprint
from megatron_flex.planner.memory import slab_elements
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.tensor import TensorParallel
from megatron_flex.programs import build_program
from megatron_flex.runtime.arena import ArenaTransport
from megatron_flex.runtime.executor import Executor, Handler
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.memory import Expected
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.shards import owned_state
from megatron_flex.runtime.slab import Slab
from megatron_flex.runtime.step import StepInputs, StepResult
from megatron_flex.runtime.world import World
from megatron_flex.schedule.compact import groups_of
from megatron_flex.schedule.instructions import Backward, Program, ReduceGradient
from megatron_flex.schedule.part import part_of
from megatron_flex.schedule.transition import transition
from megatron_flex.schedule.validate import validate
from tests.close import assert_numbers_close, assert_state_close

# The gradient of the key's bias is exactly zero in theory and rounding noise (1e-9) in practice.
# With an epsilon of 1e-8 Adam turns that noise into steps; this keeps it out of the comparison.
ADAM_EPS = 1e-6
# Some gradients of each model are clipped, some are not.
CLIP_GRAD = 0.6

TINY = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=90,
    padded_vocab_size=96,
    max_position_embeddings=128,
    ffn_hidden_size=64,
    kv_channels=8,
    num_query_groups=4,
)


BERT = replace(
    TINY, architecture="bert", causal=False, num_tokentypes=2, binary_head=True, num_layers=2
)

Fault = Callable[[Executor, Program], Program]
"""Breaks this worker's part of an iteration; returns the program that it runs instead."""


@dataclass(frozen=True)
class Outcome:
    """What one rank reports: the losses (the same on all) and the state that it owns.

    Of ``config``'s tensors each of ``sharing`` ranks of a device has a part.
    """

    results: tuple[StepResult, ...]
    state: dict[str, torch.Tensor]
    updates: int
    config: ModelConfig
    sharing: int


def batch_of(iteration: int, size: int = 8, longest: int = 60) -> GlobalBatch:
    """A global batch with very uneven lengths, the same wherever it is asked for."""
    lengths = np.random.default_rng(iteration).integers(1, longest, size)
    lengths[0] = longest
    return GlobalBatch(iteration * size, lengths.astype(np.int64), (int(lengths.sum()),))


def packed(config: ModelConfig, micro_batch: MicroBatch, masked: frozenset[int]) -> PackedBatch:
    """Random tokens keyed by sample; samples in ``masked`` give no loss.

    BERT predicts some of the tokens, and has two segments and a sentence order a sample.
    """
    rows = []
    slices = micro_batch.slices
    for piece in slices:
        rng = np.random.default_rng((7, piece.sample))
        tokens = rng.integers(0, config.vocab_size, piece.length + 1)
        rows.append(tokens[piece.start : piece.stop + 1])
    mask = [
        _targets(config, s.sample, s.length)[s.start : s.stop] * (s.sample not in masked)
        for s in slices
    ]
    types = order = None
    if config.binary_head:
        segments = [np.arange(s.tokens) >= s.tokens // 2 for s in slices]
        types = torch.from_numpy(np.concatenate(segments).astype(np.int64))
        order = torch.tensor([-1 if s.sample in masked else int(s.sample % 3 == 0) for s in slices])
    found = PackedBatch(
        lengths=tuple(s.tokens for s in slices),
        samples=tuple(s.sample for s in slices),
        starts=tuple(s.start for s in slices),
        totals=tuple(s.length for s in slices),
        tokens=torch.from_numpy(np.concatenate([r[:-1] for r in rows])),
        labels=torch.from_numpy(np.concatenate([r[1:] for r in rows])),
        loss_mask=torch.from_numpy(np.concatenate(mask).astype(np.float32)),
        token_types=types,
        sentence_order=order,
    )
    if micro_batch.tail:
        return found.with_tail(micro_batch.tail)
    return found.padded(micro_batch.padded) if micro_batch.padded else found


def _targets(config: ModelConfig, sample: int, tokens: int) -> Any:
    """Which tokens of a sample are predicted: all in GPT, some in BERT, at least the first."""
    if config.architecture == "gpt":
        return np.ones(tokens, bool)
    chosen = np.random.default_rng((8, sample)).random(tokens) < 0.3
    chosen[0] = True
    return chosen


def train(
    config: ModelConfig,
    plans: str | Sequence[str],
    iterations: int = 10,
    *,
    policy: str = "1f1b",
    fault: str | Fault = "",
    masked: frozenset[int] = frozenset(),
    longest: int = 60,
    way: str = "early",
    exact: bool = False,
    fault_when: str = "always",
    budget: int | None = None,
    cut: Cut | None = None,
    capacity: int | None = None,
    evaluate: bool = False,
    migrate: bool = False,
    count_zeros: bool = False,
    scatter: bool = False,
    each: Callable[[int, Executor], None] | None = None,
    arena: Callable[[World], ArenaTransport] | None = None,
    sharing: int = 1,
    sequence_parallel: bool = False,
    divided: int = 0,
) -> Outcome:
    """Train on this worker's part of ``plans``: one, or one for each iteration (the last stays).

    Args:
        fault: the name of a fault that :func:`inject` knows, or one that breaks executor and
            program itself; when an iteration has ended the executor's handlers are the honest ones.
        way: how slabs reach new holders: ``early``, ``late`` or ``mixed``.
        fault_when: ``always`` (from iteration 3 on) or ``switch`` (only in the first iteration
            that switches).
        budget: most tokens of a micro-batch; by default two thirds of ``longest``.
        cut: how batches are cut, if not by that.
        capacity: most process groups to keep; by default as in training.
        scatter: reduce sharded gradients as on GPUs.
        evaluate: evaluate a batch between any two iterations.
        migrate: the last half of the micro-batches runs on the next plan already.
        each: called after every iteration.
        arena: makes what carries late moves within a server; by default messages do.
        sharing: ranks that are one device, and share its layers.
        sequence_parallel: they divide tokens too.
        divided: devices of a server, between which each of them sends a share of messages.
    """
    cpu, limit = torch.device("cpu"), timedelta(seconds=30)
    world = World.create(cpu, limit, sharing, sequence_parallel=sequence_parallel)
    if capacity is not None and world.reductions is not None:
        world.reductions.capacity = capacity
    if scatter and world.reductions is not None:
        world.reductions.scatters = True
    texts = [plans] if isinstance(plans, str) else list(plans)
    listed = [Plan.parse(t) for t in texts]
    layers = config.layers
    for plan in listed:
        plan.check(layers.num_units, world.size)
    holdings = Holdings(
        config, listed[0], world.rank, world.device, exact=exact, group=world.tensor
    )
    optimizer = OptimizerConfig(adam_eps=ADAM_EPS, clip_grad=CLIP_GRAD)
    executor = Executor(world, holdings, optimizer, None if arena is None else arena(world))
    tensor = TensorParallel(sharing, sequence_parallel)
    footprint = Footprint(config, exact=exact, tensor=tensor, divided=divided)
    results = []
    broken = False
    honest = dict(executor.handlers)
    for iteration in range(iterations):
        plan, following = (listed[min(i, len(listed) - 1)] for i in (iteration, iteration + 1))
        switch = None
        if plan != following:
            odd = frozenset((s, d) for s in range(layers.num_slabs) for d in range(world.size)
                            if (s + d) % 2)  # fmt: skip
            late = {"early": frozenset[tuple[int, int]](), "late": None, "mixed": odd}[way]
            switch = transition(
                plan, following, layers, late=late, elements=slab_elements(config, tensor)
            )
        batch = batch_of(iteration, longest=longest)
        batch = replace(batch, denominators=denominators(config, batch, masked))
        by = cut or Cut(budget or 2 * longest // 3)
        parts = by.micro_batches(batch, plan.cut)
        moved = _second_half(parts) if migrate else ()
        program = build_program(
            config,
            plan,
            parts,
            world.size,
            policy=policy,
            switch=switch,
            moved=moved,
            tensor=tensor,
        )
        if world.rank == 0:  # it is the same one everywhere
            validate(program, layers)
        if world.reductions is not None:
            world.reductions.prepare(set(groups_of(program.instructions)))
        due = iteration >= 3 if fault_when == "always" else switch is not None and not broken
        if fault and due:
            if isinstance(fault, str):
                program = inject(fault, executor, program, first=not broken)
            else:
                program = fault(executor, program)
            broken = True
        sliced = [p.sliced for p in parts]
        inputs = StepInputs(
            partial(_read, config, parts, masked),
            batch.denominators,
            StepSize(learning_rate=1e-3, weight_decay=0.1),
            count_zeros=count_zeros,
            memory=Expected(*footprint.device(program, world.rank, sliced)),
        )
        results.append(executor.run(part_of(program, world.rank, divided), inputs))
        executor.handlers.update(honest)
        if switch is not None:
            holdings.adopt(following)
        if evaluate:
            results.append(_evaluate(executor, config, following, parts, inputs))
        if each is not None:
            each(iteration, executor)
    executor.settle()
    state = {k: v.clone() for k, v in owned_state(world, holdings).items()}
    return Outcome(tuple(results), state, holdings.updates, config, sharing)


def _second_half(parts: Sequence[MicroBatch]) -> tuple[int, ...]:
    """The last half of the micro-batches, chains whole."""
    moved = set(range(len(parts) // 2, len(parts)))
    for chain in chains_of(parts):
        if chain[0] not in moved:
            moved -= set(chain)
    return tuple(sorted(moved))


def _evaluate(
    executor: Executor,
    config: ModelConfig,
    plan: Plan,
    parts: tuple[MicroBatch, ...],
    inputs: StepInputs,
) -> StepResult:
    """Evaluate the batch that was just trained on, on the plan that comes next."""
    world = executor.world
    program = build_program(config, plan, parts, world.size, forward_only=True)
    validate(program, config.layers, forward_only=True)
    return executor.run(part_of(program, world.rank), replace(inputs, step_size=None))


def _read(
    config: ModelConfig,
    parts: tuple[MicroBatch, ...],
    masked: frozenset[int],
    micro_batch: int,
    inputs: bool,
    targets: bool,
) -> PackedBatch:
    return packed(config, parts[micro_batch], masked)


def denominators(
    config: ModelConfig, batch: GlobalBatch, masked: frozenset[int]
) -> tuple[int, ...]:
    """Targets of a whole batch, for each loss."""
    samples = [
        (batch.first_sample + i, int(n))
        for i, n in enumerate(batch.lengths)
        if batch.first_sample + i not in masked
    ]
    if config.architecture == "gpt":
        return (sum(n for _, n in samples),)
    targets = sum(int(_targets(config, sample, n).sum()) for sample, n in samples)
    return (targets, len(samples)) if config.binary_head else (targets,)


Merged = tuple[tuple[StepResult, ...], dict[str, torch.Tensor]]
"""A whole run: results, and all state by name."""


def merge(outcomes: list[Outcome]) -> Merged:
    """One run's losses and its whole state. Every tensor must have exactly one owner."""
    parts: dict[str, list[torch.Tensor]] = {}
    first = outcomes[0]
    for outcome in outcomes:
        assert outcome.results == first.results, "workers disagree about the results"
        for name, tensor in outcome.state.items():
            parts.setdefault(name, []).append(tensor)
    for name, tensors in parts.items():
        assert len(tensors) == first.sharing, f"{name} has {len(tensors)} owners"
    counts = {o.updates for o in outcomes}
    assert len(counts) == 1, f"workers count different numbers of updates: {counts}"
    return first.results, {n: whole(first.config, n, tensors) for n, tensors in parts.items()}


def whole(config: ModelConfig, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor of which ranks that share a layer have ``parts``; of a replicated one, all."""
    cut = cut_of(config, name)
    if cut is None:
        assert all(part.equal(parts[0]) for part in parts), f"ranks have different {name}"
        return parts[0]
    if len(parts) == 1:
        return parts[0]
    whole = torch.empty(full_shape(parts[0].shape, cut, len(parts)), dtype=parts[0].dtype)
    for index, part in enumerate(parts):
        for piece in pieces(whole.shape, cut, index, len(parts)):
            extent = piece.sizes[cut.dim]
            source = part.narrow(cut.dim, piece.local[cut.dim], extent)
            whole.narrow(cut.dim, piece.offsets[cut.dim], extent).copy_(source)
    return whole


def assert_same(
    actual: Merged,
    expected: Merged,
) -> None:
    """Losses and norms number by number, weights and moments tensor by tensor."""
    for number, (a, e) in enumerate(zip(actual[0], expected[0], strict=True)):
        assert a.skipped == e.skipped
        assert_numbers_close(a.losses, e.losses, 3e-7, f"loss of iteration {number}")
        assert_numbers_close(a.grad_norm, e.grad_norm, 1e-6, f"norm of iteration {number}")
    # Where a gradient is nearly zero Adam makes much of another order of sums: 6e-6 of a bias in
    # random sequences of plans (and nothing with exact sums), 4e-5 with the oldest instructions.
    far = 3e-5 if native.cap_cpu() == "avx512" else 1e-4
    assert_state_close(actual[1], expected[1], far)


def assert_equal_bits(actual: Merged, expected: Merged) -> None:
    """Losses, norms, weights and moments are the very same."""
    for number, (a, e) in enumerate(zip(actual[0], expected[0], strict=True)):
        assert (a.losses, a.grad_norm) == (e.losses, e.grad_norm), f"iteration {number}"
    assert actual[1].keys() == expected[1].keys()
    different = [n for n, v in expected[1].items() if not v.equal(actual[1][n])]
    assert not different, f"other bits in {different}"


def inject(fault: str, executor: Executor, program: Program, *, first: bool) -> Program:
    """Break something on purpose; the comparison with one process must notice."""
    holdings = executor.holdings
    if fault == "lost moments of one bias":
        for slab in holdings if first else ():
            for entry in slab.layout.entries:
                if entry.name == "decoder.layers.1.mlp.linear_fc2.bias":
                    slab.view(slab.exp_avg, entry).zero_()
                    slab.view(slab.exp_avg_sq, entry).zero_()
    elif fault == "lost step count":
        if first:
            holdings.updates = 0
    elif fault == "wrong decay group":
        for slab in holdings:
            slab.layout = replace(slab.layout, decayed=slab.layout.numel)
    elif fault == "norm counted twice":
        for slab in holdings:
            if slab.index == holdings.config.layers.tied_slab:
                twice = partial(_doubled_norm, slab)
                slab.squared_norm = twice  # type: ignore[method-assign]
    elif fault == "missing reduction":
        lists = tuple(
            tuple(i for i in ops if not isinstance(i, ReduceGradient) or i.slab != 2)
            for ops in program.instructions
        )
        program = replace(program, instructions=lists)
    elif fault == "missed micro-batch":
        executor.handlers[Backward] = _forgetful(executor, executor.handlers[Backward])
    else:
        raise ValueError(fault)
    return program


def _doubled_norm(slab: Slab, part: Any) -> torch.Tensor:
    return 2 * Slab.squared_norm(slab, part)


def _forgetful(executor: Executor, honest: Handler) -> Handler:
    """Backward that forgets the weight gradients of micro-batch 0 on the first stage."""

    def backward(run: Any, op: Any) -> None:
        before = {slab.index: slab.grads.clone() for slab in executor.holdings}
        honest(run, op)
        if op.micro_batch == 0 and op.stage == 0:
            for slab in executor.holdings:
                slab.grads.copy_(before[slab.index])

    return backward
