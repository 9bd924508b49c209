"""Names and values that go to TensorBoard and Weights & Biases, as in Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_flex.telemetry.interval import IntervalSummary
from megatron_flex.telemetry.log_line import perplexity
from megatron_flex.telemetry.record import IterationRecord, ValidationRecord

BY_SAMPLES = " vs samples"
"""End of the names of series over consumed samples, as in Megatron-LM."""


@dataclass(frozen=True)
class Scalar:
    """A number at an iteration. With ``by_samples`` there is a second series over the consumed
    samples, named ``{name} vs samples``."""

    name: str
    value: float
    by_samples: bool = True


@dataclass(frozen=True)
class ScalarOptions:
    """Which optional series are wanted; the names are those of the flags."""

    world_size: int
    log_loss_scale: bool = True
    log_validation_ppl: bool = False
    log_memory: bool = False
    log_world_size: bool = False
    log_timers: bool = False


def iteration_scalars(record: IterationRecord, options: ScalarOptions) -> Iterator[Scalar]:
    """Series of every iteration."""
    yield Scalar("learning-rate", record.learning_rate)
    yield Scalar("batch-size", record.global_batch_size)
    for name, value in record.losses.items():
        yield Scalar(name, value)
    if options.log_loss_scale:
        yield Scalar("loss-scale", record.loss_scale)
    if options.log_world_size:
        yield Scalar("world-size", options.world_size)
    if record.grad_norm is not None:
        yield Scalar("grad-norm", record.grad_norm)
    if record.num_zeros is not None:
        yield Scalar("num-zeros", record.num_zeros)
    if record.params_norm is not None:
        yield Scalar("params-norm", record.params_norm)
    if options.log_memory:
        for name, value in record.memory.items():
            yield Scalar(name, value, by_samples=False)
    # Not in Megatron-LM.
    yield Scalar("tokens", record.tokens, by_samples=False)
    rate = record.tokens / max(record.elapsed, 1e-9)
    yield Scalar("tokens-per-second", rate, by_samples=False)
    if record.plan:
        yield Scalar("stages", record.plan.count("|") + 1, by_samples=False)
    for name, value in record.extra.items():
        yield Scalar(name, value, by_samples=False)


def interval_scalars(summary: IntervalSummary, options: ScalarOptions) -> Iterator[Scalar]:
    """Series of every log line."""
    if not options.log_timers:
        return
    yield Scalar("iteration-time", summary.seconds_per_iteration, by_samples=False)
    yield Scalar("throughput", summary.throughput.tflops, by_samples=False)
    yield Scalar("padding", summary.throughput.padding_percent, by_samples=False)
    if summary.throughput.mfu_percent is not None:
        yield Scalar("mfu", summary.throughput.mfu_percent, by_samples=False)


def validation_scalars(record: ValidationRecord, options: ScalarOptions) -> Iterator[Scalar]:
    """Series of validations. As in Megatron-LM the test set is printed only."""
    if record.test:
        return
    for name, value in record.losses.items():
        yield Scalar(f"{name} validation", value)
        if options.log_validation_ppl:
            yield Scalar(f"{name} validation ppl", perplexity(value))
