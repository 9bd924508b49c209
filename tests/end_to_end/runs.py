"""Whole runs through the training loop, on the workers of the pool: flags in, history out."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_flex import entry
from megatron_flex.arguments import parse
from megatron_flex.config.config import Architecture
from megatron_flex.loop.assemble import assemble
from megatron_flex.loop.measuring import with_measured
from megatron_flex.model.config import ModelConfig
from megatron_flex.runtime.shards import owned_state
from megatron_flex.runtime.world import World
from megatron_flex.telemetry.record import CompletionRecord, IterationRecord, ValidationRecord
from megatron_flex.training import Trainer
from tests.close import assert_numbers_close, assert_state_close
from tests.distributed.jobs import whole
from tests.distributed.pool import WorkerPool
from tests.unit.data.files import write_flat

VOCABULARY = 90

MODEL = shlex.split(
    "--num-layers 3 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 64"
    f" --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32"
    # The gradient of the key's bias is zero in theory and noise in practice: see jobs.ADAM_EPS.
    " --adam-eps 1e-6 --distributed-backend gloo --num-workers 0"
)
"""A model of 8 units, with Megatron's default dropout."""

TRAINING = shlex.split(
    "--micro-batch-tokens 50 --global-batch-size 8 --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine"
    " --lr-warmup-iters 2 --weight-decay 0.1 --log-interval 1"
)


@dataclass
class History:
    """What a run recorded; stands in for the recorder and keeps everything."""

    iterations: list[IterationRecord] = field(default_factory=list)
    validations: list[ValidationRecord] = field(default_factory=list)
    completed: list[CompletionRecord] = field(default_factory=list)

    def iteration(self, record: IterationRecord) -> None:
        """Keep an iteration."""
        self.iterations.append(record)

    def validation(self, record: ValidationRecord) -> None:
        """Keep a validation."""
        self.validations.append(record)

    def completions(self, records: Sequence[CompletionRecord]) -> None:
        """Keep what was completed."""
        self.completed += records

    def summary(self, *_: object) -> tuple[str, ...]:
        """Nothing is said at the end."""
        return ()

    def close(self) -> None:
        """Nothing is pending."""


@dataclass(frozen=True)
class Run:
    """One worker's account of a run: its history (equal on all workers), and its own state.

    Of the tensors of ``model`` each of ``sharing`` workers of a device has a part.
    """

    history: History
    state: dict[str, torch.Tensor]
    updates: int
    schedule: dict[str, Any]
    progress: dict[str, Any]
    printed: tuple[str, ...]
    model: ModelConfig
    sharing: int

    @property
    def losses(self) -> list[tuple[float, ...]]:
        """Losses of each iteration."""
        return [tuple(r.losses.values()) for r in self.history.iterations]

    @property
    def norms(self) -> list[float | None]:
        """Gradient norm of each iteration."""
        return [r.grad_norm for r in self.history.iterations]


class _Quiet(Trainer):
    """A trainer that keeps what it would print, whichever worker speaks."""

    def _say(self, line: str) -> None:
        vars(self).setdefault("printed", []).append(line)


def train(argv: Sequence[str], architecture: Architecture = "gpt") -> Run:
    """What ``pretrain`` does, on this worker of the pool."""
    size = dist.get_world_size()
    config = parse(
        argv, architecture=architecture, world_size=size, saved_values=entry.saved_values
    )
    sharing = config.parallel.tensor_model_parallel_size
    world = World.create(
        torch.device("cpu"),
        timedelta(seconds=60),
        sharing,
        sequence_parallel=config.parallel.sequence_parallel,
    )
    parts = with_measured(config, world, assemble(config))
    trainer = _Quiet(config, world, parts)
    history = History()
    with closing(trainer.recorder):
        trainer.recorder = history  # type: ignore[assignment]
        trainer.run()
    trainer.iterations.executor.settle()
    state = owned_state(world, trainer.holdings)
    return Run(
        history,
        {k: v.clone() for k, v in state.items()},
        trainer.holdings.updates,
        trainer.schedule.state_dict(),
        trainer.progress.values(),
        tuple(vars(trainer)["printed"]),
        parts.model,
        sharing,
    )


def run(
    workers: WorkerPool,
    size: int,
    argv: Sequence[str],
    architecture: Architecture = "gpt",
    timeout: float = 120.0,
    job: Callable[[Sequence[str], Architecture], Run] = train,
) -> Run:
    """Run on ``size`` workers; they must agree about everything but whose state is whose."""
    accounts = workers.run(size, job, tuple(argv), architecture, timeout=timeout)
    first, parts = accounts[0], defaultdict[str, list[torch.Tensor]](list)
    for account in accounts:
        assert account.losses == first.losses, "workers disagree about the losses"
        assert account.updates == first.updates
        assert account.progress == first.progress
        for name, tensor in account.state.items():
            parts[name].append(tensor)
    for name, tensors in parts.items():
        assert len(tensors) == first.sharing, f"{name} has {len(tensors)} owners"
    return replace(first, state={n: whole(first.model, n, t) for n, t in parts.items()})


def assert_equal_bits(actual: Run, expected: Run) -> None:
    """Weights, moments and counters are the very same."""
    assert actual.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        assert torch.equal(actual.state[name], tensor), f"{name} differs"
    assert actual.updates == expected.updates
    assert actual.schedule == expected.schedule
    assert actual.progress == expected.progress


def assert_same(actual: Run, expected: Run, start: int = 0) -> None:
    """Losses from iteration ``start`` on, weights and moments by tensor."""
    assert_numbers_close(actual.losses, expected.losses[start:], 3e-7, "losses")
    assert_numbers_close(actual.norms, expected.norms[start:], 1e-6, "norms")
    assert_state_close(actual.state, expected.state, 1e-5)
    assert actual.updates == expected.updates


def write_documents(prefix: Path, count: int = 50, longest: int = 60) -> str:
    """A data set of ``count`` documents of very different lengths, two tokens and more."""
    rng = np.random.default_rng(count)
    lengths = rng.integers(2, longest, count)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    return write_flat(prefix, [rng.integers(0, VOCABULARY, n).tolist() for n in lengths])
