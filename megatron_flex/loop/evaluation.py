"""Validation and test: forward only, on the same layout, over all workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_flex.data.batches import BatchSource
from megatron_flex.loop.iteration import Iterations
from megatron_flex.loop.steps import Steps
from megatron_flex.model.config import loss_names


@dataclass(frozen=True)
class Evaluation:
    """Means of each loss over all its tokens, and how much was evaluated.

    ``signals`` are true where any worker's was after the last batch.
    """

    losses: dict[str, float]
    samples: int
    tokens: int
    signals: tuple[bool, ...] = ()


def evaluate(
    iterations: Iterations,
    steps: Steps,
    source: BatchSource,
    batch_size: int,
    batches: int | None,
    signals: Callable[[], tuple[bool, ...]] = tuple,
) -> Evaluation:
    """Evaluate the first ``batches`` batches of ``source``; ``None`` takes all there are.

    ``source`` does not repeat: a validation always sees the same samples, and with fewer than
    asked for it sees each once; the last batch may be smaller. ``signals`` gives what this worker
    wants all to know; the evaluation ends with the batch at which any is true on any worker.
    """
    total = source.num_samples
    assert total is not None, "an evaluation needs a source that ends"
    wanted = total if batches is None else min(total, batches * batch_size)
    names = loss_names(iterations.executor.holdings.config)
    sums, counts = [0.0] * len(names), [0] * len(names)
    tokens = samples = 0
    agreed: tuple[bool, ...] = ()
    for first in range(0, wanted, batch_size):
        size = min(batch_size, wanted - first)
        batch = source.batch(first, size)
        micro_batches = iterations.cut(batch, iterations.plan)
        told = steps.evaluation(iterations.plan, source, first, size, micro_batches)
        result = iterations.evaluate(source, batch, told, micro_batches, signals())
        for i, (mean, count) in enumerate(zip(result.losses, batch.denominators, strict=True)):
            sums[i] += mean * count
            counts[i] += count
        tokens += batch.tokens
        samples += batch.size
        agreed = result.signals
        if any(agreed):
            break
    losses = {n: s / c if c else 0.0 for n, s, c in zip(names, sums, counts, strict=True)}
    return Evaluation(losses, samples, tokens, agreed)
