#!/usr/bin/env python3
"""What instruction lists cost on one worker, and what packing without padding gains.

    python benchmarks/overhead.py [--iterations 12] [--layers 4] [--hidden 128] [--batch 16]
                                  [--tokens 1024] [--longest 1024] [--vocab 4096] [--device cpu]

Lengths are drawn from the published statistics of an instruction-tuning mixture (`--mock-data`).
The arms train the same model on the same global batches, one batch after the other, and take turns
at each; figures are medians over the batches, and of the ratios within each batch. Beside the time
on the clock stands the processor time, which other programs on the machine disturb less.

- `by hand`: a plain loop over the same blocks and the same packed micro-batches, with autograd,
  clip_grad_norm_ and fused AdamW. Everything is ready before its clock starts.
- `executor`: the same micro-batches through a program and the executor.
- `iteration`: what the training loop does: cut the batch, schedule, validate new shapes, read the
  tokens, execute.
- `padded`: the executor on samples padded to the longest of their global batch, as many in a
  micro-batch as the token budget holds. Padding counts in its time, not in its tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")

import torch

from benchmarks.directed import Directed
from megatron_flex.arguments import parse
from megatron_flex.data.batches import BatchSource
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.data.packed import PackedBatch
from megatron_flex.loop.assemble import assemble
from megatron_flex.loop.cutting import run_cut
from megatron_flex.model.blocks import build_block, decays
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.flops import cost_coefficients
from megatron_flex.programs import build_program
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.step import StepInputs
from megatron_flex.runtime.world import World
from megatron_flex.schedule.part import part_of

RATE, DECAY, CLIP = 1e-3, 0.1, 1.0
STEP = StepSize(RATE, DECAY)

Seconds = tuple[float, float]
"""On the clock, and of the processor."""

Arm = Callable[[GlobalBatch, list[PackedBatch], tuple[MicroBatch, ...]], float]
"""Trains on one global batch; gives its loss."""


class ByHand:
    """The loop that one would write without this package's runtime."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        blocks = [build_block(unit, model).to(device) for unit in model.layers.units]
        self.blocks = torch.nn.ModuleList(blocks)
        named: dict[str, torch.nn.Parameter] = {}
        for block in blocks:  # the tied embedding is one parameter of two blocks
            for parameters in block.slab_parameters().values():
                for name, parameter in parameters.items():
                    if name in named:
                        block.bind(name, named[name])
                    named.setdefault(name, parameter)
        groups = [
            {"params": [p for n, p in named.items() if decays(n, p.shape) is wanted],
             "weight_decay": DECAY if wanted else 0.0}
            for wanted in (True, False)
        ]  # fmt: skip
        self.parameters = list(named.values())
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)

    def __call__(
        self, batch: GlobalBatch, packed: list[PackedBatch], parts: tuple[MicroBatch, ...]
    ) -> float:
        """One iteration."""
        total = 0.0
        for micro_batch in packed:
            hidden = None
            for block in self.blocks:
                hidden = block(hidden, micro_batch)
            assert hidden is not None
            loss = hidden.sum() / batch.denominators[0]
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class Through:
    """The executor, on micro-batches that are ready."""

    def __init__(self, directed: Directed) -> None:
        self.iterations = directed.iterations

    def __call__(
        self, batch: GlobalBatch, packed: list[PackedBatch], parts: tuple[MicroBatch, ...]
    ) -> float:
        """One iteration."""
        executor = self.iterations.executor
        model = executor.holdings.config
        program = build_program(model, self.iterations.plan, parts, 1)
        inputs = StepInputs(lambda m, inputs, targets: packed[m], batch.denominators, STEP)
        return executor.run(part_of(program, 0), inputs).losses[0]


def padded(
    source: BatchSource, batch: GlobalBatch, budget: int
) -> tuple[list[PackedBatch], tuple[MicroBatch, ...]]:
    """The batch in micro-batches whose samples are all as long as the longest."""
    longest = int(batch.lengths.max())
    at_once = max(1, budget // longest)
    packed, parts = [], []
    for first in range(0, batch.size, at_once):
        samples = range(first, min(first + at_once, batch.size))
        numbers = [batch.first_sample + s for s in samples]
        rows = [
            source.packed(
                MicroBatch((Slice.all_of(number, int(batch.lengths[s])),)),
                inputs=True,
                targets=True,
            )
            for s, number in zip(samples, numbers, strict=True)
        ]
        packed.append(
            PackedBatch(
                lengths=(longest,) * len(rows),
                samples=tuple(numbers),
                starts=(0,) * len(rows),
                tokens=_padded([r.tokens for r in rows], longest),
                labels=_padded([r.labels for r in rows], longest),
                loss_mask=_padded([r.loss_mask for r in rows], longest),
            )
        )
        parts.append(MicroBatch(tuple(Slice.all_of(n, longest) for n in numbers)))
    return packed, tuple(parts)


def _padded(rows: list[torch.Tensor | None], length: int) -> torch.Tensor:
    present = [row for row in rows if row is not None]
    return torch.cat([torch.nn.functional.pad(r, (0, length - len(r))) for r in present])


def measure(arguments: argparse.Namespace) -> tuple[dict[str, list[Seconds]], list[int]]:
    """Times of each arm for each batch, and the real tokens of each batch."""
    config = parse(
        f"--mock-data --vocab-size {arguments.vocab} --num-layers {arguments.layers}"
        f" --hidden-size {arguments.hidden} --num-attention-heads {max(1, arguments.hidden // 64)}"
        f" --seq-length {arguments.longest} --micro-batch-tokens {arguments.tokens}"
        f" --global-batch-size {arguments.batch} --train-iters 1000 --lr {RATE}".split(),
        world_size=1,
    )
    device = torch.device(arguments.device)
    parts_of_run = assemble(config)
    model, source = parts_of_run.model, parts_of_run.train
    if device.type == "cuda":
        model = replace(model, attention_dropout=0.0, params_dtype="bfloat16")
    assert source is not None
    coefficients = cost_coefficients(model)

    def directed() -> Directed:
        world = World.create(device, timedelta(minutes=1))
        holdings = Holdings(model, parts_of_run.plan, 0, device)
        executor = Executor(world, holdings, OptimizerConfig(clip_grad=CLIP))
        return Directed(config, replace(parts_of_run, model=model), parts_of_run.plan, executor)

    whole = directed()

    def loop(batch: GlobalBatch, packed: list[PackedBatch], parts: tuple[MicroBatch, ...]) -> float:
        return whole.train(source, batch, STEP, following=parts_of_run.plan).losses[0]

    arms: dict[str, Arm] = {
        "by hand": ByHand(model, device),
        "executor": Through(directed()),
        "iteration": loop,
        "padded": Through(directed()),
    }
    times: dict[str, list[Seconds]] = {name: [] for name in arms}
    tokens: list[int] = []
    for number in range(arguments.iterations + 2):
        batch = source.batch(number * arguments.batch, arguments.batch)
        parts = run_cut(config, coefficients, model, None).micro_batches(batch)
        losses = {}
        names = list(arms)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name == "padded":
                ready = padded(source, batch, arguments.tokens)
            else:
                ready = [source.packed(p, inputs=True, targets=True) for p in parts], parts
            packed = [_on(p, device) for p in ready[0]]
            start, used = time.perf_counter(), time.process_time()
            losses[name] = arms[name](batch, packed, ready[1])
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number > 1:  # the first rounds warm caches and allocators
                times[name].append((time.perf_counter() - start, time.process_time() - used))
        if number > 1:
            tokens.append(batch.tokens)
        tolerance = 1e-4 if model.params_dtype == "float32" else 5e-2
        for name, loss in losses.items():
            if abs(loss - losses["by hand"]) > tolerance * abs(losses["by hand"]):
                sys.exit(f"batch {number}: '{name}' has loss {loss}, by hand {losses['by hand']}")
    return times, tokens


def ratio(ours: Sequence[Seconds], theirs: Sequence[Seconds], which: int) -> float:
    """Median of the ratios within each batch."""
    return statistics.median(a[which] / b[which] for a, b in zip(ours, theirs, strict=True))


def _on(packed: PackedBatch, device: torch.device) -> PackedBatch:
    if device.type == "cpu":
        return packed
    assert packed.tokens is not None
    assert packed.labels is not None
    assert packed.loss_mask is not None
    return replace(
        packed,
        tokens=packed.tokens.to(device),
        labels=packed.labels.to(device),
        loss_mask=packed.loss_mask.to(device),
    )


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print one line an arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for flag, default, text in (
        ("iterations", 12, "global batches that count"),
        ("layers", 4, "transformer layers"),
        ("hidden", 128, "width"),
        ("batch", 16, "samples in a global batch"),
        ("tokens", 1024, "tokens in a micro-batch"),
        ("longest", 1024, "longest sample"),
        ("vocab", 4096, "vocabulary"),
    ):
        parser.add_argument(f"--{flag}", type=int, default=default, help=f"{text} ({default})")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    arguments = parser.parse_args(words)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    times, tokens = measure(arguments)
    print(
        f"{arguments.layers} layers x {arguments.hidden}, {arguments.batch} samples a batch,"
        f" {statistics.mean(tokens):.0f} tokens on average, {arguments.device},"
        f" {torch.get_num_threads()} thread(s)"
    )
    print("           ms an iteration   real tokens/s   time / by hand   processor time / by hand")
    hand = times["by hand"]
    for name, seconds in times.items():
        milliseconds = 1e3 * statistics.median(s for s, _ in seconds)
        rate = statistics.median(t / s for t, (s, _) in zip(tokens, seconds, strict=True))
        print(
            f"{name:10s} {milliseconds:15.1f} {rate:15.0f} {ratio(seconds, hand, 0):16.3f}"
            f" {ratio(seconds, hand, 1):26.3f}"
        )
    gains = (ratio(times["padded"], times["executor"], which) for which in (0, 1))
    print("packing against padding to the batch maximum, real tokens a second:"
          " {:.2f} x, by processor time {:.2f} x".format(*gains))  # fmt: skip


if __name__ == "__main__":
    main()
