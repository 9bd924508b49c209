#!/usr/bin/env python3
"""Workers that share layers: is an iteration as long, and as large, as is predicted?

    python benchmarks/tensor.py
    python benchmarks/tensor.py --sequence-parallel --rounds 3

Two workers on CPUs are one device (TP 2 x PP 1); one worker alone is what they are compared with,
in turn. In each round the profile of their layers is measured by as many processes together,
collectives included (tools/profile_layers.py), and then they train with it on a plan that stays.
What iterations take is compared with what the simulated program takes, and so is their peak memory.
"computing" is the part of it that the profile is of: forwards, backwards and updates. The first
iterations are left out.

No plan is searched meanwhile: two workers leave no core to the planner's process here. --planner
has it search all the same, as in a run with --flexpipe.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 1024"
    " --max-position-embeddings 1024 --global-batch-size 16 --micro-batch-tokens 1024 --lr 1e-3"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 2000 --log-interval 1"
    " --distributed-backend gloo"
).split()
LEFT_OUT = 2


@dataclass
class Ratios:
    """Measured over predicted, of iterations."""

    seconds: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    size: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        low, high = min(self.seconds), max(self.seconds)
        return (
            f"seconds {statistics.median(self.seconds):.3f} ({low:.3f} to {high:.3f}), computing"
            f" {statistics.median(self.computing):.3f}, bytes {statistics.median(self.size):.4f}"
            f" ({min(self.size):.4f} to {max(self.size):.4f}), of {len(self.seconds)} iterations"
        )


def run(words: list[str]) -> None:
    """A command; its output is shown where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")


def round_of(workers: int, more: list[str], iterations: int, repeats: int) -> Ratios:
    """One profile, and a run with it."""
    found = Ratios()
    with tempfile.TemporaryDirectory() as folder:
        profile, log = f"{folder}/profile.json", f"{folder}/log.jsonl"
        shared = ["--tensor-model-parallel-size", str(workers)]
        flags = [*MODEL, *more, *shared, "--train-iters", str(iterations)]
        tool = [sys.executable, str(ROOT / "tools/profile_layers.py")]
        run([*tool, *flags, "--workers", str(workers), "--repeats", str(repeats), "--held-out", "4",
             "--no-links", "--output", profile])  # fmt: skip
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc-per-node", str(workers), str(ROOT / "pretrain_gpt.py")]  # fmt: skip
        run([*torchrun, *flags, "--flexpipe-profile", profile, "--log-jsonl", log])
        lines = [json.loads(line) for line in Path(log).read_text().splitlines()]
    records = [r for r in lines if r.get("event") == "iteration"]
    for now, after in zip(records[LEFT_OUT:], records[LEFT_OUT + 1 :], strict=False):
        predicted = now["predicted-program"]
        found.seconds.append(now["elapsed"] / predicted)
        # An iteration's updates are in the next one's record.
        found.computing.append((now["seconds-compute"] + after["seconds-update"]) / predicted)
        found.size.append(now["memory-measured"] / now["memory-predicted"])
    return found


def main() -> None:
    """Print the ratios."""
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--sequence-parallel", action="store_true")
    p.add_argument("--planner", action="store_true")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--iterations", type=int, default=15)
    p.add_argument("--repeats", type=int, default=7)
    args = p.parse_args()
    planner = ["--flexpipe"] if args.planner else []
    shared = ["--sequence-parallel"] if args.sequence_parallel else []
    ways = {"one worker alone": (1, planner), "two that share": (2, [*planner, *shared])}
    medians: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1, args.rounds + 1):
        for name, (workers, more) in ways.items():
            found = round_of(workers, more, args.iterations, args.repeats)
            medians[name].append(statistics.median(found.seconds))
            print(f"round {number}, {name}: measured / predicted: {found}", flush=True)
    for name, values in medians.items():
        low, high = min(values), max(values)
        print(f"{name}: median of rounds {statistics.median(values):.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
