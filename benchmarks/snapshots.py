"""What a version in host memory costs (``--flexpipe-twin-snapshot``), with real workers here.

    python benchmarks/snapshots.py               about 3 minutes

Two workers train the same batch over and over, in rounds of two iterations. In one round of three
nothing is kept; in one a version of all weights and optimizer state is written in the background of
the round's first iteration, as in training; in one the workers wait for the copy before they go on.
A version in the background costs the difference of the rounds' times, in pairs; one that is waited
for costs the wait.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch.multiprocessing as mp

from benchmarks.directed import Directed
from benchmarks.two_workers import flags, host_memory, meet
from megatron_flex.arguments import parse
from megatron_flex.loop.assemble import assemble
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.twinlayer.manager import Shape, entry_bytes

ARMS = ("none", "background", "wait")
ROUND = 2
"""Iterations of a round: a version is complete then."""
STEP = StepSize(1e-4, 0.01)


def worker(rank: int, meeting: str, arguments: argparse.Namespace, out: str) -> None:
    """One of the two workers: rounds of all arms in turn."""
    world = meet(rank, meeting)
    middle = arguments.layers + 1
    plan = Plan.parse(f"0:{middle}@0 | {middle}:{2 * arguments.layers + 2}@1")
    words = flags(arguments.layers, arguments.hidden_size, arguments.samples)
    config = parse([*words, "--flexpipe-plan", str(plan)], world_size=2)
    parts = assemble(config)
    holdings = Holdings(parts.model, plan, rank, world.device)
    sizes = {slab: holdings.state_bytes(slab) for slab in holdings.owned}
    bank = round(world.sum(sum(map(entry_bytes, sizes.values()))))
    layers = host_memory(world, meeting, Shape(2, bank, 0))
    executor = Executor(world, holdings, OptimizerConfig())
    iterations = Directed(config, parts, plan, executor)
    source = parts.train
    assert source is not None
    batch = source.batch(0, arguments.samples)
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    waits: list[float] = []
    version = 0
    for number in range(1 + arguments.rounds):
        for arm in ARMS:
            began = time.perf_counter()
            if arm != "none":
                layers.arena.commit(version)  # complete since the last round of these
                version += 1
                layers.snapshots.begin(version, sizes, "{}" if rank == 0 else None)
                executor.copy_states(layers.snapshots.save, {})
            if arm == "wait":
                executor.settle()
                waits.append(world.slowest(time.perf_counter() - began))
            for _ in range(ROUND):
                iterations.train(source, batch, STEP, following=plan)
            elapsed = world.slowest(time.perf_counter() - began)
            if number:  # the first round warms up
                times[arm].append(elapsed)
    state = int(world.sum(sum(sizes.values())))
    if rank == 0:
        Path(out).write_text(json.dumps({"state": state, "times": times, "waits": waits[1:]}))
    layers.close()


def report(state: int, times: dict[str, list[float]], waits: list[float]) -> None:
    """Print one table."""
    usual = statistics.median(times["none"]) / ROUND
    print(f"state of the model: {state / 1e6:.0f} MB on two workers; iteration:"
          f" {usual * 1e3:.0f} ms; {len(times['none'])} versions of each kind")  # fmt: skip
    print(f"{'a version costs':24}{'median ms':>10}{'quartiles':>16}   share of time with N =")
    print(f"{'':50}   {'2':>7}{'10':>7}{'100':>7}")
    extra = [a - b for a, b in zip(times["background"], times["none"], strict=True)]
    for name, costs in (("in the background", extra), ("while all wait", waits)):
        low, middle, high = statistics.quantiles(costs, n=4)
        shares = "".join(f"{middle / (n * usual):7.2%}" for n in (2, 10, 100))
        quartiles = f"{low * 1e3:.1f} to {high * 1e3:.1f}"
        print(f"{name:24}{middle * 1e3:10.1f}{quartiles:>16}   {shares}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--samples", type=int, default=3, help="samples in the batch")
    parser.add_argument("--rounds", type=int, default=25, help="versions of each kind")
    arguments = parser.parse_args()
    for size in arguments.hidden_sizes:
        arguments.hidden_size = size
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "times.json"
            mp.spawn(worker, (f"{name}/meet", arguments, str(out)), nprocs=2)
            found = json.loads(out.read_text())
        report(found["state"], found["times"], found["waits"])


if __name__ == "__main__":
    main()
