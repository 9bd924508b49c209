"""What a switch of plans costs, by each way of switching, with real workers on this machine.

    python benchmarks/switch.py                  live, hand-over and stalling, about 5 minutes
    python benchmarks/switch.py --restarts 30    suspend-resume too (10 s or more each)

Two workers train the same batch over and over; every third iteration a layer moves from one to the
other, or back. Ways are interleaved within one run. For each switch after iteration k it prints

    stall   from the last update of k to the first operation of k+1, of the slowest worker, less
            the median of the same gap without a switch;
    extra   time of iterations k and k+1, less the medians of iterations on the two plans without
            a switch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_flex.arguments import parse
from megatron_flex.loop.assemble import assemble
from megatron_flex.loop.iteration import Iterations, cost_coefficients
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.world import World

WAYS: tuple[Literal["live", "handover", "stall"], ...] = ("live", "handover", "stall")
PERIOD = 3  # iterations on a plan; the last of them switches
STEP = StepSize(1e-4, 0.01)


@dataclass(frozen=True)
class Sample:
    """One iteration: ``position`` counts from the last switch; seconds."""

    way: str
    plan: str
    position: int
    elapsed: float
    gap: float


def flags(arguments: argparse.Namespace) -> list[str]:
    """The model and the batch, as for pretrain_gpt.py."""
    hidden, layers = arguments.hidden_size, arguments.layers
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {hidden // 64}"
        " --seq-length 512 --max-position-embeddings 512 --mock-data --vocab-size 2000"
        f" --micro-batch-tokens 512 --global-batch-size {arguments.samples} --train-iters 1000"
        " --lr 1e-4 --distributed-backend gloo --attention-dropout 0"
    ).split()


def plans(layers: int) -> tuple[str, str]:
    """Two plans on two workers, a layer apart."""
    units, middle = 2 * layers + 2, layers + 1
    return f"0:{middle}@0 | {middle}:{units}@1", f"0:{middle + 2}@0 | {middle + 2}:{units}@1"


def worker(rank: int, rendezvous: str, arguments: argparse.Namespace, out: str) -> None:
    """One of the two workers: cycles of both plans, in each way in turn."""
    torch.set_num_threads(1)
    timeout = timedelta(minutes=5)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timeout
    )
    world = World.create(torch.device("cpu"), timeout)
    words = [*flags(arguments), "--flexpipe-plan", plans(arguments.layers)[0]]
    config = parse(words, world_size=2)
    parts = assemble(config)
    first, second = map(Plan.parse, plans(arguments.layers))
    holdings = Holdings(parts.model, first, rank, world.device)
    iterations = Iterations(
        config,
        first,
        Executor(world, holdings, OptimizerConfig()),
        cost_coefficients(parts.model),
    )
    source = parts.train
    assert source is not None
    batch = source.batch(0, arguments.samples)
    samples = []
    for cycle in range(1 + arguments.cycles):
        for way in WAYS:
            chosen = replace(config.flexpipe, flexpipe_switch=way)
            iterations.config = replace(config, flexpipe=chosen)
            for plan, following in ((first, second), (second, first)):
                for position in range(PERIOD):
                    began = time.perf_counter()
                    result = iterations.train(
                        source, batch, STEP,
                        following=following if position == PERIOD - 1 else plan,
                    )  # fmt: skip
                    gap = max(m.gap for m in result.measured)
                    elapsed = world.slowest(time.perf_counter() - began)
                    if cycle:  # the first cycle warms up
                        samples.append(Sample(way, str(plan), position, elapsed, gap))
    if rank == 0:
        state = sum(s.state.nbytes for s in holdings if s.index in (3, 4))
        result_ = {"state": state, "samples": [vars(s) for s in samples]}
        Path(out).write_text(json.dumps(result_))


def suspend_resume(arguments: argparse.Namespace, directory: Path) -> list[float]:
    """Seconds from the end of an iteration to the beginning of the next, over a restart."""
    listed = []
    for number in range(arguments.restarts + 1):
        listed.append(plans(arguments.layers)[number % 2])
    script, log = directory / "plans.txt", directory / "log.jsonl"
    script.write_text("\n".join(listed) + "\n")
    words = flags(arguments)
    words[words.index("--train-iters") + 1] = str(arguments.restarts + 1)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(ROOT / "pretrain_gpt.py"), *words, "--flexpipe-plans", str(script),
        "--flexpipe-switch", "restart", "--save", str(directory / "checkpoints"),
        "--save-interval", "100000", "--keep-last-n", "1", "--log-jsonl", str(log),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [b["time"] - b["elapsed"] - a["time"] for a, b in pairwise(lines)]


def spread(values: list[float], unit: float = 1e3) -> str:
    """Median and 90th percentile."""
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"{statistics.median(ordered) * unit:9.1f} {high * unit:9.1f}"


def report(state: int, samples: list[Sample], restarts: list[float]) -> None:
    """Print the table."""
    steady_time = defaultdict(list)
    steady_gap = []
    for s in samples:
        if s.position == 1:  # neither switches nor follows a switch
            steady_time[s.plan].append(s.elapsed)
            steady_gap.append(s.gap)
    usual = {plan: statistics.median(times) for plan, times in steady_time.items()}
    gap = statistics.median(steady_gap)
    mean = statistics.mean(usual.values())
    print(f"state of the layer that moves: {state / 1e6:.1f} MB;"
          f" iteration: {mean * 1e3:.0f} ms; usual gap: {gap * 1e3:.1f} ms")  # fmt: skip
    print(f"{'':16}{'switches':>9} {'stall (ms)':>19} {'extra (ms)':>19}  of an iteration")
    print(f"{'':25} {'median':>9} {'p90':>9} {'median':>9} {'p90':>9}  {'stall':>6} {'extra':>6}")
    for way in WAYS:
        mine = [s for s in samples if s.way == way]
        stalls, extras = [], []
        for before, after in pairwise(mine):
            if before.position == PERIOD - 1 and after.position == 0:
                stalls.append(after.gap - gap)
                both = before.elapsed + after.elapsed
                extras.append(both - usual[before.plan] - usual[after.plan])
        print(f"{way:16}{len(stalls):9d} {spread(stalls)} {spread(extras)}"
              f"  {100 * statistics.median(stalls) / mean:5.1f}%"
              f" {100 * statistics.median(extras) / mean:5.1f}%")  # fmt: skip
    if restarts:
        print(f"{'suspend-resume':16}{len(restarts):9d} {spread(restarts)}"
              f"{'':20}  {100 * statistics.median(restarts) / mean:5.0f}%")  # fmt: skip


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8, help="samples in the batch")
    parser.add_argument("--cycles", type=int, default=16, help="two switches of each way a cycle")
    parser.add_argument("--restarts", type=int, default=0, help="switches by suspend-resume")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        out = directory / "samples.json"
        mp.spawn(worker, (str(directory / "meet"), arguments, str(out)), nprocs=2)
        found = json.loads(out.read_text())
        restarts = suspend_resume(arguments, directory) if arguments.restarts else []
    report(found["state"], [Sample(**s) for s in found["samples"]], restarts)


if __name__ == "__main__":
    main()
