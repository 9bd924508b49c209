"""What a run says before it begins: the model, the data, what is cut, and how long it may take."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron_flex.config.config import Config
from megatron_flex.data.batches import BatchSource
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.data.samples import WORTH_A_WARNING
from megatron_flex.loop.assemble import Parts
from megatron_flex.loop.checkpointing import Restored
from megatron_flex.loop.cores import crowding
from megatron_flex.loop.lengths import Lengths
from megatron_flex.loop.progress import Progress
from megatron_flex.loop.setup import planner_setup
from megatron_flex.planner.memory import total_parameters
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.service import Service
from megatron_flex.planner.ways import ways
from megatron_flex.quantities import count, duration

_SAMPLED = 1 << 16  # lengths that the median is taken of
_LOOKED_AT = 4  # batches that the estimated time is a mean of


@dataclass(frozen=True)
class Sizes:
    """Samples of a source and their tokens."""

    samples: int
    tokens: int
    median: int
    longest: int


def sizes(source: BatchSource) -> Sizes:
    """Look at the lengths of all samples; no token is read."""
    samples = tokens = longest = 0
    looked_at = []
    for lengths in source.all_lengths():
        samples += len(lengths)
        tokens += int(lengths.sum())
        longest = max(longest, int(lengths.max()))
        looked_at.append(lengths[:: 1 + len(lengths) // _SAMPLED])
    return Sizes(samples, tokens, int(np.median(np.concatenate(looked_at))), longest)


def data_lines(config: Config, source: BatchSource, found: Sizes) -> Iterator[str]:
    """The training data, and what of it is left out."""
    counts = [one.selection.counts for one in source.sets]
    documents = sum(c.documents for c in counts)
    yield (
        f" training data: {count(found.tokens)} tokens in {found.samples:,} samples of"
        f" {documents:,} documents; half of the samples have up to {found.median:,} tokens, the"
        f" longest has {found.longest:,}"
    )
    limit = f"--max-sample-length {config.data.max_sample_length}"
    if "max_sample_length" not in config.given:
        limit = f"--seq-length {config.model.seq_length}"
    truncated, cut = sum(c.truncated for c in counts), sum(c.cut_tokens for c in counts)
    dropped, gone = sum(c.dropped for c in counts), sum(c.dropped_tokens for c in counts)
    no_target = sum(c.no_target for c in counts)
    tokens = max(1, sum(c.tokens for c in counts))
    mark, advice = "   ", ""
    if (cut + gone) / tokens >= WORTH_A_WARNING:
        mark, advice = " warning: ", ": raise it"
        if config.data.overlong != "split" and all(c.dividable for c in counts):
            advice += ", or make several samples of a document with --overlong split"
    if truncated:
        yield (
            f"{mark}cut: {truncated:,} samples ({truncated / found.samples:.1%}) are longer than"
            f" {limit} and lose their ends, {cut / tokens:.1%} of all tokens{advice}"
        )
    if dropped:
        yield (
            f"{mark}left out: {dropped:,} documents ({dropped / documents:.1%}) are longer than"
            f" {limit}, {gone / tokens:.1%} of all tokens{advice}"
        )
    elif gone:
        yield (
            f"{mark}left out: {gone / tokens:.1%} of all tokens, which have no target within"
            f" {limit}{advice}"
        )
    if no_target:
        yield (
            f"   left out: {no_target:,} documents without a target (too short, or of one sentence"
            " where BERT learns the order of two)"
        )
    if not truncated and not dropped:
        yield f"   cut: nothing; no sample is longer than {limit}"


def model_line(config: Config, parts: Parts) -> str:
    """The model in a line."""
    m = parts.model
    return (
        f" model: {config.architecture.upper()} with {count(total_parameters(m))} parameters"
        f" ({m.num_layers} layers of width {m.hidden_size}, vocabulary of {m.padded_vocab_size:,})"
    )


def beginning(config: Config, parts: Parts, plan: Plan, restored: Restored) -> Iterator[str]:
    """What a run begins with, and what of that may surprise."""
    yield f" plan: {plan}"
    origin = restored.source or "random weights"
    yield f" {origin}: starting at iteration {restored.progress.iteration}"
    before, sharing = restored.tensor_size, config.parallel.tensor_model_parallel_size
    if config.flexpipe.flexpipe_bitwise and before not in (None, sharing):
        yield (
            f" warning: --tensor-model-parallel-size was {before} and is {sharing}: with"
            " --flexpipe-bitwise bits are equal at one size only"
        )
    for warning in parts.warnings:
        yield f" warning: {warning}"
    # Of the training data `opening` says more.
    for split, source in (("valid", parts.valid), ("test", parts.test)):
        for samples in () if source is None else source.sets:
            counts = samples.selection.counts
            yield f" {split} data: {counts}"
            lost = counts.warning(config.data.max_sample_length)
            if lost is not None:
                yield f" warning: {split} data: {lost}"


def opening(
    config: Config, parts: Parts, plan: Plan, progress: Progress, coefficients: CostCoefficients
) -> Iterator[str]:
    """All lines, for a run that begins with ``plan`` after ``progress``."""
    yield model_line(config, parts)
    p = config.parallel
    if p.tensor_model_parallel_size > 1:
        tokens = " and divide tokens" if p.sequence_parallel else ""
        yield (
            f" devices: {config.devices}, each of {p.tensor_model_parallel_size} workers that share"
            f" layers{tokens}"
        )
    source = parts.train
    if source is None:
        return
    found = sizes(source)
    yield from data_lines(config, source, found)
    t = config.training
    left = t.train_iters - progress.iteration
    if left <= 0:
        if not config.evaluation.skip_train:
            more = "--train-iters" if t.train_samples is None else "--train-samples"
            yield (
                f" this run: nothing is left to train after iteration {progress.iteration:,}; a"
                f" larger {more} trains on"
            )
        return
    samples = left * t.global_batch_size
    if t.train_samples is not None:
        samples = t.train_samples - progress.consumed_samples
    text = (
        f" this run: {left:,} iterations, {samples:,} samples, about"
        f" {count(samples * found.tokens / found.samples)} tokens or"
        f" {samples / found.samples:.3g} times through the data"
    )
    seconds = predicted(config, parts, plan, progress, coefficients)
    # It is not finite where the plan is too large for the described memory.
    if seconds is None or not math.isfinite(seconds):
        yield f"{text}; how long it takes is in the log lines"
        return
    yield (
        f"{text}; roughly {duration(left * seconds)} by the cost model ({seconds:.2g} s an"
        " iteration), which the log lines' ETA corrects by what is measured"
    )


def predicted(
    config: Config, parts: Parts, plan: Plan, progress: Progress, coefficients: CostCoefficients
) -> float | None:
    """Seconds of an iteration, by the cost model; ``None`` where it does not know the devices."""
    f, devices = config.flexpipe, config.devices
    if parts.train is None or (torch.cuda.is_available() and f.flexpipe_cluster is None):
        return None
    setup = planner_setup(config, parts, devices, coefficients)
    planner = Service(setup).planner
    first = progress.iteration
    lengths = Lengths(
        parts.train, first, progress.consumed_samples, config.training.batch_sizes.size
    )
    times = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a profile of other sizes: the estimate is rough anyway
        for number in range(first, first + _LOOKED_AT):
            finder = planner.finder(ways(setup.cut, lengths.of(number), devices))
            times.append(finder.best_of(plan, None).price.seconds)
    return crowding(config.world_size) * sum(times) / len(times)
