"""What slices gain with real workers: one long sample, half of the tokens, among short ones.

    python benchmarks/slices.py                       about 3 minutes on two idle cores
    python benchmarks/slices.py --long 4096 --cycles 5
    python benchmarks/slices.py --short --cycles 40   is a choice that gains nothing free?

Two workers of one thread each train on the same batch, on plans that are fixed before: the planner
chooses one for whole samples and one for slices, with costs that are measured first. Its own time
and that of making programs are not in the iterations'. Medians of interleaved iterations, with the
interquartile range; perfect is half the time of one worker that does everything, in the same run.
The peak is that of the fuller worker. With ``--short`` all samples are short, nothing is worth
slicing, and the last line has what ``--flexpipe-slice-tokens auto`` takes against 0: the median
over neighbouring iterations, and the interval that holds it with 95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.multiprocessing as mp
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from benchmarks.directed import Directed
from benchmarks.two_workers import meet
from megatron_flex.arguments import parse
from megatron_flex.config.config import Config
from megatron_flex.loop.assemble import Parts, assemble
from megatron_flex.loop.setup import planner_setup
from megatron_flex.planner.flops import cost_coefficients
from megatron_flex.planner.messages import Question
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.service import Service
from megatron_flex.profiling import Workbench, fit, grid, measure
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize

CPU = torch.device("cpu")
STEP = StepSize(1e-4, 0.01)
SHORT = 128
Job = tuple[str, str]
"""One iteration: its name, and its plan."""


def flags(arguments: argparse.Namespace, directory: str, slices: str) -> list[str]:
    """The model and the data, as for pretrain_gpt.py."""
    hidden = arguments.hidden_size
    return (
        f"--num-layers {arguments.layers} --hidden-size {hidden} --num-attention-heads"
        f" {hidden // 64} --seq-length {arguments.long} --tokenizer-type NullTokenizer"
        f" --vocab-size 4000 --data-path {directory}/data --split 1,0,0 --max-position-embeddings"
        f" {arguments.long} --global-batch-size {1 + arguments.long // SHORT} --train-iters 1000"
        f" --lr 1e-4 --distributed-backend gloo --flexpipe --flexpipe-slice-tokens {slices}"
        f" --flexpipe-lookahead 1 --flexpipe-profile {directory}/profile.json"
    ).split()


def write_data(arguments: argparse.Namespace, directory: str) -> None:
    """One global batch of documents: a long one, and short ones with as many tokens."""
    builder = IndexedDatasetBuilder(f"{directory}/data.bin", dtype=np.int32)
    longest = SHORT if arguments.short else arguments.long
    for length in (longest, *[SHORT] * (arguments.long // SHORT)):
        builder.add_document(torch.arange(length + 1) % 4000, [length + 1])
    builder.finalize(f"{directory}/data.idx")


def write_profile(config: Config, directory: str) -> None:
    """Measure the model's parts on one thread."""
    torch.set_num_threads(1)
    bench = Workbench(assemble(config).model, CPU)
    shapes = grid([128, 512, 1024], [64, 512, 1024])
    profile = fit(bench, measure(bench, shapes, 5), shapes, "benchmark", {})
    Path(directory, "profile.json").write_text(profile.to_json())


def prepare(arguments: argparse.Namespace, directory: str, slices: str) -> tuple[Config, Parts]:
    """Configuration and data."""
    config = parse(flags(arguments, directory, slices), world_size=2)
    return config, assemble(config)


def chosen(config: Config, parts: Parts) -> str:
    """The planner's plan."""
    setup = planner_setup(config, parts, 2, cost_coefficients(parts.model))
    source = parts.train
    assert source is not None
    lengths = tuple(source.batch(0, config.training.global_batch_size).lengths.tolist())
    decision = Service(setup).answer(Question(0, (lengths,))).decision
    assert decision is not None
    return str(decision.plan)


def worker(rank: int, directory: str, arguments: argparse.Namespace, jobs: Sequence[Job]) -> None:
    """One of the two workers: runs the jobs in order; the first writes what they took."""
    world = meet(rank, f"{directory}/meet")
    first = Plan.parse(jobs[0][1])
    ways: dict[str, Directed] = {}
    executor: Executor | None = None
    for slices in ("0", "auto"):
        config, parts = prepare(arguments, directory, slices)
        if executor is None:
            holdings = Holdings(parts.model, first, rank, CPU)
            executor = Executor(world, holdings, OptimizerConfig())
        ways[slices] = Directed(config, parts, first, executor)
    source = parts.train
    assert source is not None
    batch = source.batch(0, config.training.global_batch_size)
    rows = []
    plan = first
    for number, (name, _) in enumerate(jobs):
        following = Plan.parse(jobs[min(number + 1, len(jobs) - 1)][1])
        directed = ways["auto" if name == "slices" else "0"]
        directed.iterations.plan = plan
        told, cut = directed.told(batch, following)
        world.barrier()
        began = time.perf_counter()
        result = directed.iterations.train(source, batch, STEP, told, cut, following=following)
        elapsed = world.slowest(time.perf_counter() - began)
        fullest = max(result.measured, key=lambda m: m.memory)
        rows.append((name, elapsed, told.seconds, fullest.memory, fullest.predicted))
        plan = following
    if rank == 0:
        Path(directory, "rows.json").write_text(json.dumps(rows))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--long", type=int, default=2048, help="tokens of the long sample")
    parser.add_argument("--short", action="store_true", help="instead: all samples are short")
    parser.add_argument("--cycles", type=int, default=9)
    arguments = parser.parse_args()
    if arguments.cycles < 2:
        parser.error("--cycles must be at least 2: one time has no quartiles")
    with tempfile.TemporaryDirectory() as directory:
        write_data(arguments, directory)
        closed = parse(flags(arguments, directory, "0")[:-2], world_size=2)
        write_profile(closed, directory)
        plans = {"one worker": f"0:{2 * arguments.layers + 2}@0 ; schedule 1f1b ; cut {SHORT}"}
        for name, slices in (("whole samples", "0"), ("slices", "auto")):
            plans[name] = chosen(*prepare(arguments, directory, slices))
        # Three times each, of which the second counts: state moves in the first and the last.
        jobs = [(n, p) for _ in range(1 + arguments.cycles) for n, p in plans.items()
                for _ in range(3)]  # fmt: skip
        mp.spawn(worker, (directory, arguments, jobs), nprocs=2)
        rows = json.loads(Path(directory, "rows.json").read_text())
    seconds: dict[str, list[float]] = defaultdict(list)
    told: dict[str, float] = {}
    peaks: dict[str, tuple[float, float]] = {}
    for name, elapsed, predicted, counted, foreseen in rows[3 * len(plans) + 1 :: 3]:
        seconds[name].append(elapsed)
        told[name] = predicted
        old = peaks.get(name, (0.0, 0.0))
        peaks[name] = max(counted, old[0]), max(foreseen, old[1])
    perfect = statistics.median(seconds["one worker"]) / 2
    if arguments.short:
        print(f"{1 + arguments.long // SHORT} samples of {SHORT} tokens")
    else:
        print(f"one sample of {arguments.long} tokens among {arguments.long // SHORT} of {SHORT}")
    print(f"{'':15}{'time (ms)':>10}{'quartiles':>14}{'of perfect':>12}{'predicted':>11}"
          f"{'peak (MB)':>11}{'predicted':>11}  plan")  # fmt: skip
    for name, values in seconds.items():
        low, median, high = statistics.quantiles(values, n=4)
        counted, foreseen = peaks[name]
        quartiles = f"{1e3 * low:.0f}-{1e3 * high:.0f}"
        print(
            f"{name:15}{1e3 * median:10.0f}{quartiles:>14}{median / perfect:12.2f}"
            f"{1e3 * told[name]:11.0f}{counted / 1e6:11.1f}{foreseen / 1e6:11.1f}  {plans[name]}"
        )
    if arguments.short:
        print(against(seconds["slices"], seconds["whole samples"]))


def against(ours: Sequence[float], others: Sequence[float]) -> str:
    """Median ratio of neighbouring iterations; its interval by the sign test."""
    ratios = sorted(a / b for a, b in zip(ours, others, strict=True))
    n, outside, count = len(ratios), 0.0, 0
    while (outside := outside + math.comb(n, count) / 2.0**n) <= 0.025:
        count += 1
    low, high = (ratios[max(0, count - 1)], ratios[n - max(1, count)])
    middle = statistics.median(ratios)
    interval = f"{low - 1:+.1%} to {high - 1:+.1%}"
    return f"auto against 0: {middle - 1:+.1%} of the time (95 %: {interval})"


if __name__ == "__main__":
    main()
