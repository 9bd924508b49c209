"""What each memory optimisation costs and saves, with real workers on this machine.

    python benchmarks/memory.py                       about 5 minutes
    python benchmarks/memory.py --budget 0.7 --mixture 150
    python benchmarks/memory.py --replicas --mixture 0

First the same batch under each choice in turn, on two stages of one worker each; medians of
interleaved iterations, and the peak of the fuller worker, predicted and counted. The last row is
the planner's choice for a budget that is ``--budget`` times what no optimisation takes; it is
compared with the fastest of the other rows within that budget. With ``--replicas`` the workers are
replicas of one stage, which may split its optimizer state; the planner's choice does.

Then batches of the length mixture, with a budget that the given part of batches keeps to without
optimisation: what the planner chooses for each iteration against what the longest batch needs, set
for all of them. Costs come from a profile that is measured first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.multiprocessing as mp

from benchmarks.chain_memory import table
from benchmarks.directed import Directed
from benchmarks.two_workers import meet
from megatron_flex.arguments import parse
from megatron_flex.cluster.cluster import load
from megatron_flex.config.config import Config
from megatron_flex.data.batches import BatchSource
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.link_speed import host_link
from megatron_flex.loop.assemble import Parts, assemble
from megatron_flex.loop.cutting import run_cut
from megatron_flex.planner.build import Batch
from megatron_flex.planner.flops import cost_coefficients
from megatron_flex.planner.limits import MARGIN
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import OPlan, Plan
from megatron_flex.planner.planner import Planner
from megatron_flex.profiling import Workbench, fit, grid, measure
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize

STEP = StepSize(1e-4, 0.01)
CPU = torch.device("cpu")
BLOCK = 5
"""Batches that each of the two ways of the second table trains on before it is the other's turn."""
Job = tuple[str, int, str]
"""One iteration: its name, the first sample of its batch, its plan."""


def flags(arguments: argparse.Namespace) -> list[str]:
    """The model and the data, as for pretrain_gpt.py."""
    hidden, layers = arguments.hidden_size, arguments.layers
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {hidden // 64}"
        " --seq-length 2048 --max-position-embeddings 2048 --mock-data --vocab-size 4000"
        f" --micro-batch-tokens {arguments.tokens} --global-batch-size {arguments.samples}"
        " --train-iters 100000 --lr 1e-4 --distributed-backend gloo"
    ).split()


def plan_text(arguments: argparse.Namespace) -> str:
    """Two stages; the output layer counts as about one layer here. Or two replicas of all."""
    layers = arguments.layers
    units = 2 * layers + 2
    if arguments.replicas:
        return f"0:{units}@0,1"
    return f"0:{layers + 2}@0 | {layers + 2}:{units}@1"


def prepare(arguments: argparse.Namespace) -> tuple[Config, Parts, BatchSource]:
    """Configuration and data."""
    words = [*flags(arguments), "--flexpipe-plan", plan_text(arguments)]
    config = parse(words, world_size=2)
    parts = assemble(config)
    assert parts.train is not None
    return config, parts, parts.train


def worker(rank: int, directory: str, arguments: argparse.Namespace, jobs: Sequence[Job]) -> None:
    """One of the two workers: runs the jobs in order; the first writes what they took."""
    world = meet(rank, f"{directory}/meet")
    config, parts, source = prepare(arguments)
    first = Plan.parse(jobs[0][2])
    holdings = Holdings(parts.model, first, rank, CPU)
    executor = Executor(world, holdings, OptimizerConfig())
    iterations = Directed(config, parts, first, executor)
    rows = []
    for number, (name, sample, _) in enumerate(jobs):
        following = Plan.parse(jobs[min(number + 1, len(jobs) - 1)][2])
        batch = source.batch(sample, arguments.samples)
        world.barrier()
        began = time.perf_counter()
        result = iterations.train(source, batch, STEP, following=following)
        elapsed = world.slowest(time.perf_counter() - began)
        fullest = max(result.measured, key=lambda m: m.memory)
        rows.append((name, elapsed, batch.tokens, fullest.memory, fullest.predicted))
    if rank == 0:
        Path(directory, "rows.json").write_text(json.dumps(rows))


Row = tuple[str, float, int, float, float]


def run(arguments: argparse.Namespace, jobs: Sequence[Job]) -> list[Row]:
    """Name, seconds, tokens, counted and predicted peak of every job."""
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(worker, (directory, arguments, list(jobs)), nprocs=2)
        return [tuple(row) for row in json.loads(Path(directory, "rows.json").read_text())]


class Chooser:
    """The planner, with a measured profile and a layout that stays."""

    def __init__(self, config: Config, parts: Parts, *, shard: bool) -> None:
        self._shard = shard
        torch.set_num_threads(1)
        self._config, self._parts = config, parts
        bench = Workbench(parts.model, CPU)
        shapes = grid([128, 512, 1024], [64, 512])
        samples = measure(bench, shapes, 5)
        self._profile = fit(bench, samples, shapes, "benchmark", {"host": host_link(CPU)})
        self._cluster = replace(load("cpux2"), servers=1, devices_per_server=2)

    def batch(self, batch: GlobalBatch) -> Batch:
        """The micro-batches of a batch."""
        coefficients = cost_coefficients(self._parts.model)
        model, profile = self._parts.model, self._parts.profile
        return Batch.of(run_cut(self._config, coefficients, model, profile).micro_batches(batch))

    def planner(self, budget: float) -> Planner:
        """A planner for a budget in bytes."""
        options = PlannerOptions(budget=int(budget), exact_memory=True, shard_optimizer=self._shard)
        return Planner(self._parts.model, self._profile, self._cluster, options)

    def fitted(self, plan: Plan, batch: GlobalBatch, budget: float) -> Plan | None:
        """The layout of ``plan`` with the memory optimisation that a batch needs, if it fits."""
        planner = self.planner(budget)
        finder = planner.finder([self.batch(batch)])
        candidate = planner.fitted(finder, finder.best_of(plan, None))
        return candidate.plan if candidate.price.fits else None

    def peak(self, plan: Plan, batch: GlobalBatch) -> float:
        """Predicted bytes of the fullest worker, with the plan's own O_plan."""
        planner = self.planner(1e15)
        assert planner.fitter is not None
        return max(planner.maker.keep(plan, self.batch(batch)).peaks)


def same_batch(arguments: argparse.Namespace, chooser: Chooser, source: BatchSource) -> None:
    """The first table."""
    layout = Plan.parse(plan_text(arguments))
    units = 2 * arguments.layers + 2
    halves, every = tuple(range(1, units - 1)), tuple(range(units))
    ways = {
        "none": OPlan(),
        "recompute": OPlan(recompute=halves),
        "offload optimizer": OPlan(optimizer=every),
        "offload activations": OPlan(activations=halves),
        "offload both": OPlan(optimizer=every, activations=halves),
        "recompute, offload": OPlan(recompute=halves, optimizer=every),
    }
    plans = {name: replace(layout, o_plan=o) for name, o in ways.items()}
    if arguments.replicas:
        plans["sharded"] = layout.sharded()
        plans["sharded, recompute"] = plans["recompute"].sharded()
    batch = source.batch(0, arguments.samples)
    budget = arguments.budget * chooser.peak(layout, batch)
    chosen = chooser.fitted(layout, batch, budget)
    if chosen is not None:
        plans["planner's choice"] = chosen
    # Three times each, of which the second counts: in the first optimizer state moves from or to
    # the host, in the last parts are cut anew for the plan that follows.
    names = [name for _ in range(1 + arguments.cycles) for name in plans for _ in range(3)]
    rows = run(arguments, [(name, 0, str(plans[name])) for name in names])
    seconds: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, float] = defaultdict(float)
    predicted: dict[str, float] = defaultdict(float)
    for name, elapsed, _, counted, foreseen in rows[3 * len(plans) + 1 :: 3]:
        seconds[name].append(elapsed)
        peaks[name] = max(peaks[name], counted)
        predicted[name] = max(predicted[name], foreseen)
    base = statistics.median(seconds["none"])
    print(f"budget: {budget / 1e6:.1f} MB, {arguments.budget:g} of what no optimisation takes")
    print(f"{'':22}{'time (ms)':>10}{'against none':>14}{'peak (MB)':>11}{'predicted':>11}  fits")
    within = {}
    for name in plans:
        median = statistics.median(seconds[name])
        fits = peaks[name] <= budget
        if fits:
            within[name] = median
        sizes = f"{peaks[name] / 1e6:11.1f}{predicted[name] / 1e6:11.1f}"
        more = f"{100 * (median / base - 1):+13.1f}%"
        print(f"{name:22}{1e3 * median:10.0f}{more}{sizes}  {'yes' if fits else 'no'}", flush=True)
    if chosen is not None:
        print(f"the choice: {chosen.o_plan}")
        others = {name: t for name, t in within.items() if name != "planner's choice"}
        if others and "planner's choice" in within:
            best = min(others, key=lambda name: others[name])
            slower = 100 * (within["planner's choice"] / others[best] - 1)
            print(f"it is {slower:+.1f} % against the fastest of the others that fit ({best})")


def mixture(arguments: argparse.Namespace, chooser: Chooser, source: BatchSource) -> None:
    """The second table."""
    layout = Plan.parse(plan_text(arguments))
    firsts = [arguments.samples * i for i in range(arguments.mixture)]
    batches = [source.batch(first, arguments.samples) for first in firsts]
    peaks = [chooser.peak(layout, batch) for batch in batches]
    order = sorted(range(len(peaks)), key=peaks.__getitem__)
    budget = peaks[order[int(arguments.part * (len(order) - 1))]] / (1.0 - MARGIN)
    longest = chooser.fitted(layout, batches[order[-1]], budget)
    each = [chooser.fitted(layout, batch, budget) for batch in batches]
    if longest is None or None in each:
        print("the budget is too small for the longest batch: choose a larger --part")
        return
    jobs: list[Job] = []
    for number, start in enumerate(range(0, len(firsts), BLOCK)):
        block = range(start, min(start + BLOCK, len(firsts)))
        one = [("each iteration", firsts[i], str(each[i])) for i in block]
        other = [("longest batch", firsts[i], str(longest)) for i in block]
        jobs += [*one, *other] if number % 2 else [*other, *one]
    rows = run(arguments, [jobs[0], *jobs])[1:]
    need = sum(bool(plan and plan.o_plan) for plan in each)
    print(f"\n{len(batches)} batches of the length mixture; with a budget of {budget / 1e6:.1f} MB"
          f" {need} of them need optimisation")  # fmt: skip
    print(f"set for the longest batch: {longest.o_plan}")
    print(f"{'':18}{'tokens/s':>10}{'most (MB)':>11}{'over budget':>13}")
    rates = {}
    for name in ("longest batch", "each iteration"):
        mine = [row for row in rows if row[0] == name]
        rates[name] = sum(row[2] for row in mine) / sum(row[1] for row in mine)
        most = max(row[3] for row in mine)
        over = sum(row[3] > budget for row in mine)
        print(f"{name:18}{rates[name]:10.1f}{most / 1e6:11.1f}{over:13d}")
    gain = 100 * (rates["each iteration"] / rates["longest batch"] - 1)
    print(f"chosen for each iteration: {gain:+.1f} %")


def main() -> None:
    """All tables."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--hidden-size", type=int, default=256)
    p.add_argument("--tokens", type=int, default=1024, help="token budget of a micro-batch")
    p.add_argument("--samples", type=int, default=16, help="of a global batch")
    p.add_argument("--cycles", type=int, default=9, help="iterations of each row")
    p.add_argument("--replicas", action="store_true", help="two replicas instead of two stages")
    p.add_argument("--budget", type=float, default=0.75, help="part of what no optimisation takes")
    p.add_argument("--mixture", type=int, default=60, help="batches of the second table; 0: none")
    p.add_argument("--part", type=float, default=0.97, help="of batches that need no optimisation")
    p.add_argument("--slices", type=int, default=16, help="of the last table; 0: none")
    p.add_argument("--slice-tokens", type=int, default=256)
    p.add_argument("--only-slices", action="store_true")
    arguments = p.parse_args()
    config, parts, source = prepare(arguments)
    if arguments.only_slices:
        table(parts.model, arguments.slices, arguments.slice_tokens, arguments.cycles)
        return
    chooser = Chooser(config, parts, shard=arguments.replicas)
    same_batch(arguments, chooser, source)
    if arguments.mixture:
        mixture(arguments, chooser, source)
    if arguments.slices:
        table(parts.model, arguments.slices, arguments.slice_tokens, arguments.cycles)


if __name__ == "__main__":
    main()
