"""Iterations and evaluations of one process, from flags."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch

from megatron_flex.data.batches import BatchSource
from megatron_flex.data.microbatches import cut_by_count
from megatron_flex.loop.assemble import Parts, assemble
from megatron_flex.loop.evaluation import evaluate
from megatron_flex.loop.iteration import Iterations, cost_coefficients
from megatron_flex.planner.flops import model_work
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig
from megatron_flex.runtime.world import World
from tests.unit.config.commands import config
from tests.unit.model.support import run

CPU = torch.device("cpu")


def alone() -> tuple[Iterations, Parts]:
    """What a run of one worker with dropout consists of."""
    flags = config("--hidden-dropout 0.1 --attention-dropout 0.1", world_size=1)
    parts = assemble(flags)
    holdings = Holdings(parts.model, parts.plan, 0, CPU)
    executor = Executor(World(0, 1, CPU, timedelta(seconds=10)), holdings, OptimizerConfig())
    return Iterations(flags, parts.plan, executor, cost_coefficients(parts.model)), parts


def mean_by_hand(iterations: Iterations, source: BatchSource, samples: int) -> tuple[float, int]:
    """The loss of each sample alone, summed; divided by all their tokens."""
    holdings = iterations.executor.holdings
    holdings.train(False)
    blocks = [holdings.blocks[unit] for unit in sorted(holdings.blocks)]
    batch = source.batch(0, samples)
    with torch.no_grad():
        total = sum(
            run(blocks, source.packed(one, inputs=True, targets=True)).double()
            for one in cut_by_count(batch, 1)
        )
    return float(total) / batch.tokens, batch.tokens


@pytest.mark.parametrize(
    ("size", "batches", "samples"), [(4, 3, 12), (5, None, 13), (20, None, 13)]
)
def test_an_evaluation_is_a_mean_over_all_tokens_of_all_batches(
    size: int, batches: int | None, samples: int
) -> None:
    iterations, parts = alone()
    assert parts.valid is not None
    source = _First(parts.valid, 13)
    found = evaluate(iterations, source, size, batches)
    mean, tokens = mean_by_hand(iterations, source, samples)
    assert (found.samples, found.tokens) == (samples, tokens)
    assert list(found.losses) == ["lm loss"]
    assert found.losses["lm loss"] == pytest.approx(mean, rel=1e-5)


class _First(BatchSource):
    """The first samples of a source that has more."""

    def __init__(self, source: BatchSource, count: int) -> None:
        super().__init__(source.sets, source._order)
        self._count = count

    @property
    def num_samples(self) -> int:
        return self._count


def test_micro_batches_are_balanced_by_floating_point_operations() -> None:
    _, parts = alone()
    cost = cost_coefficients(parts.model)
    lengths = np.array([1.0, 17.0, 400.0, 30000.0])
    work = [sum(w.forward(n, n * n) for w in model_work(parts.model)) for n in lengths]
    ours = cost.linear * lengths + cost.quadratic * lengths**2
    assert ours / ours[0] == pytest.approx(np.array(work) / work[0])
    assert cost.linear == 1.0
