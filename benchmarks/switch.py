"""What a switch of plans costs, by each way of switching, with real workers on this machine.

    python benchmarks/switch.py                  all but suspend-resume, about 5 minutes a size
    python benchmarks/switch.py --restarts 30    suspend-resume too (10 s or more each)

Two workers train the same batch over and over; every third iteration a layer moves from one to the
other, or back. Ways are interleaved within one run. For each switch after iteration k it prints

    stall   from the last update of k on any worker to the first operation of k+1 on the slowest,
            without its wait for the stage before and with waits of operations for state that comes
            late, less the median of the same gap on the same plan without a switch;
    extra   time of iterations k and k+1, less the medians of iterations on the two plans without
            a switch.

Ways: "live" sends the state while iteration k computes; "handover" after its update, through the
host memory of the server (TwinLayers); "messages" the same by messages (without TwinLayers);
"stall" between iterations while all wait.
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
from itertools import pairwise
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch.multiprocessing as mp

from benchmarks.directed import Directed
from benchmarks.two_workers import flags, host_memory, meet
from megatron_flex.arguments import parse
from megatron_flex.loop.assemble import assemble
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.arena import ArenaTransport
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.twinlayer.manager import Shape

WAYS: dict[str, Literal["live", "handover", "stall"]] = {
    "live": "live",
    "handover": "handover",
    "messages": "handover",
    "stall": "stall",
}
"""How to switch, and the value of --flexpipe-switch that does it."""
PAPER = {"handover": 0.98, "messages": 3.0, "stall": 3.55, "suspend-resume": 10.0}
"""Seconds of figure 10c of the paper: GPT-3.35B within a server."""
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


def plans(layers: int) -> tuple[str, str]:
    """Two plans on two workers, a layer apart."""
    units, middle = 2 * layers + 2, layers + 1
    return f"0:{middle}@0 | {middle}:{units}@1", f"0:{middle + 2}@0 | {middle + 2}:{units}@1"


def worker(rank: int, rendezvous: str, arguments: argparse.Namespace, out: str) -> None:
    """One of the two workers: cycles of both plans, in each way in turn."""
    world = meet(rank, rendezvous)
    words = flags(arguments.layers, arguments.hidden_size, arguments.samples)
    words += ["--flexpipe-plan", plans(arguments.layers)[0]]
    config = parse(words, world_size=2)
    parts = assemble(config)
    first, second = map(Plan.parse, plans(arguments.layers))
    holdings = Holdings(parts.model, first, rank, world.device)
    total = sum(holdings.state_bytes(slab) for slab in range(parts.model.layers.num_slabs))
    room = host_memory(world, rendezvous, Shape(0, 0, 2 * total)).hand_overs
    transport = ArenaTransport(rank, (0,) * world.size, room)
    with_memory = Executor(world, holdings, OptimizerConfig(), transport)
    by_messages = Executor(world, holdings, OptimizerConfig())
    by_messages.clock = with_memory.clock  # a gap may begin with one and end with the other
    directed = Directed(config, parts, first, with_memory)
    iterations = directed.iterations
    source = parts.train
    assert source is not None
    batch = source.batch(0, arguments.samples)
    samples = []
    for cycle in range(1 + arguments.cycles):
        for way, value in WAYS.items():
            chosen = replace(config.flexpipe, flexpipe_switch=value)
            iterations.config = replace(config, flexpipe=chosen)
            iterations.executor.settle()
            iterations.executor = with_memory if way == "handover" else by_messages
            for plan, following in ((first, second), (second, first)):
                for position in range(PERIOD):
                    ended = world.slowest(by_messages.clock.ended or 0.0)
                    began = time.perf_counter()
                    directed.train(
                        source, batch, STEP,
                        following=following if position == PERIOD - 1 else plan,
                    )  # fmt: skip
                    elapsed = world.slowest(time.perf_counter() - began)
                    gap = world.slowest(by_messages.clock.ready or 0.0) - ended
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
    words = flags(arguments.layers, arguments.hidden_size, arguments.samples)
    words[words.index("--train-iters") + 1] = str(arguments.restarts + 1)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(ROOT / "pretrain_gpt.py"), *words, "--flexpipe-plans", str(script),
        "--flexpipe-switch", "restart", "--save", str(directory / "checkpoints"),
        "--save-interval", "100000", "--keep-last-n", "1", "--log-jsonl", str(log),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    lines = [o for o in map(json.loads, log.read_text().splitlines()) if o["event"] == "iteration"]
    return [b["time"] - b["elapsed"] - a["time"] for a, b in pairwise(lines)]


def spread(values: list[float], unit: float = 1e3) -> str:
    """Median and 90th percentile."""
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"{statistics.median(ordered) * unit:9.1f} {high * unit:9.1f}"


def report(state: int, samples: list[Sample], restarts: list[float]) -> None:
    """Print the table."""
    steady_time = defaultdict(list)
    steady_gap = defaultdict(list)
    for s in samples:
        if s.position == 1:  # neither switches nor follows a switch
            steady_time[s.plan].append(s.elapsed)
            steady_gap[s.plan].append(s.gap)
    usual = {plan: statistics.median(times) for plan, times in steady_time.items()}
    gaps = {plan: statistics.median(found) for plan, found in steady_gap.items()}
    mean = statistics.mean(usual.values())
    print(f"state of the layer that moves: {state / 1e6:.1f} MB;"
          f" iteration: {mean * 1e3:.0f} ms;"
          f" usual gap: {statistics.mean(gaps.values()) * 1e3:.1f} ms")  # fmt: skip
    print(f"{'':16}{'switches':>9} {'stall (ms)':>19} {'extra (ms)':>19}  of an iteration")
    print(f"{'':25} {'median':>9} {'p90':>9} {'median':>9} {'p90':>9}  {'stall':>6} {'extra':>6}")
    medians = {}
    for way in WAYS:
        stalls, extras = [], []
        for before, after in pairwise(samples):  # the gap comes in the iteration after, of any way
            if before.way == way and before.position == PERIOD - 1 and after.position == 0:
                stalls.append(after.gap - gaps[after.plan])
                both = before.elapsed + after.elapsed
                extras.append(both - usual[before.plan] - usual[after.plan])
        medians[way] = statistics.median(stalls)
        print(f"{way:16}{len(stalls):9d} {spread(stalls)} {spread(extras)}"
              f"  {100 * statistics.median(stalls) / mean:5.1f}%"
              f" {100 * statistics.median(extras) / mean:5.1f}%")  # fmt: skip
    if restarts:
        print(f"{'suspend-resume':16}{len(restarts):9d} {spread(restarts)}"
              f"{'':20}  {100 * statistics.median(restarts) / mean:5.0f}%")  # fmt: skip
        medians["suspend-resume"] = statistics.median(restarts)
    for way in [way for way in medians if way in PAPER and way != "handover"]:
        ratio = max(medians[way], 0.0) / max(medians["handover"], 1e-4)
        print(f"stall of {way} / hand-over through host memory: {ratio:.1f}"
              f" (figure 10c, GPT-3.35B: {PAPER[way] / PAPER['handover']:.1f})")  # fmt: skip


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--hidden-sizes", type=int, nargs="+", default=[512, 768], help="one table for each"
    )
    parser.add_argument("--samples", type=int, default=8, help="samples in the batch")
    parser.add_argument("--cycles", type=int, default=16, help="two switches of each way a cycle")
    parser.add_argument("--restarts", type=int, default=0, help="switches by suspend-resume")
    arguments = parser.parse_args()
    for size in arguments.hidden_sizes:
        arguments.hidden_size = size
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            out = directory / "samples.json"
            mp.spawn(worker, (str(directory / "meet"), arguments, str(out)), nprocs=2)
            found = json.loads(out.read_text())
            restarts = suspend_resume(arguments, directory) if arguments.restarts else []
        report(found["state"], [Sample(**s) for s in found["samples"]], restarts)


if __name__ == "__main__":
    main()
