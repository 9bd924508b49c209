"""What ``--flexpipe-bitwise`` costs: iterations with and without exact sums, in turn.

    python benchmarks/bitwise.py

One worker trains the same batches with float32 sums and with exact ones, interleaved. Printed are
medians of the iteration time, and the bytes of gradients a parameter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.directed import Directed
from megatron_flex.arguments import parse
from megatron_flex.loop.assemble import assemble
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.world import World

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 1024"
    " --max-position-embeddings 1024 --mock-data --vocab-size 4000 --micro-batch-tokens 1024"
    " --global-batch-size 12 --train-iters 1000 --lr 1e-4 --distributed-backend gloo"
).split()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = parse(FLAGS, world_size=1)
    parts = assemble(config)
    assert parts.train is not None
    batch = parts.train.batch(0, config.training.global_batch_size)
    world = World.create(torch.device("cpu"), timedelta(minutes=1))
    arms = {}
    for name, exact in (("float32", False), ("exact", True)):
        holdings = Holdings(parts.model, parts.plan, 0, world.device, exact=exact)
        executor = Executor(world, holdings, OptimizerConfig())
        arms[name] = Directed(config, parts, parts.plan, executor)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(arguments.rounds + 1):
        for name, iterations in arms.items():
            began = time.perf_counter()
            iterations.train(parts.train, batch, StepSize(1e-4, 0.01), following=parts.plan)
            if turn:  # the first warms up
                times[name].append(time.perf_counter() - began)
    plain, exact_ = (statistics.median(times[name]) for name in ("float32", "exact"))
    pairs = [e / p for p, e in zip(times["float32"], times["exact"], strict=True)]
    last = arms["exact"].iterations.last
    count = len(last[1]) if last else 0
    print(f"{batch.tokens} tokens in {count} micro-batches")
    print(f"float32 sums: {plain * 1e3:7.1f} ms    4 bytes of gradients a parameter are reduced")
    print(f"exact sums:   {exact_ * 1e3:7.1f} ms    8 bytes")
    print(f"ratio, median of pairs: {statistics.median(pairs):.3f}")


if __name__ == "__main__":
    main()
