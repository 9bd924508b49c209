#!/usr/bin/env python3
"""Workers that share layers: is an iteration as long, and as large, as the planner predicts?

    python benchmarks/tensor.py
    python benchmarks/tensor.py --sequence-parallel --rounds 3

Two workers on CPUs are one device (TP 2 x PP 1). In each round the profile of their layers is
measured by both together, collectives included (tools/profile_layers.py), and then they train with
it; what iterations take is compared with what the planner said, and so is their peak memory. The
first iterations are left out: the planner corrects its later predictions by what is measured, so
the ratios are to what it predicts without correction.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 1024"
    " --max-position-embeddings 1024 --global-batch-size 16 --micro-batch-tokens 1024 --lr 1e-3"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 2000 --log-interval 1"
    " --distributed-backend gloo --tensor-model-parallel-size 2"
).split()
LEFT_OUT = 2


def run(words: list[str], quiet: bool = True) -> None:
    """A command; its output is shown where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=quiet, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")


def round_of(more: list[str], iterations: int, repeats: int) -> tuple[list[float], list[float]]:
    """Measured over predicted seconds, and bytes, of each iteration of one run."""
    with tempfile.TemporaryDirectory() as folder:
        profile, log = f"{folder}/profile.json", f"{folder}/log.jsonl"
        flags = [*MODEL, *more, "--train-iters", str(iterations)]
        tool = [sys.executable, str(ROOT / "tools/profile_layers.py")]
        run([*tool, *flags, "--workers", "2", "--repeats", str(repeats), "--held-out", "4",
             "--no-links", "--output", profile])  # fmt: skip
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc-per-node", "2", str(ROOT / "pretrain_gpt.py")]  # fmt: skip
        run([*torchrun, *flags, "--flexpipe", "--flexpipe-profile", profile, "--log-jsonl", log])
        lines = [json.loads(line) for line in Path(log).read_text().splitlines()]
    records = [r for r in lines if r.get("event") == "iteration"][LEFT_OUT:]
    seconds = [
        r["elapsed"] / r.get("predicted-uncorrected", r["predicted"])
        for r in records
        if r.get("predicted")
    ]
    size = [r["memory-measured"] / r["memory-predicted"] for r in records]
    return seconds, size


def main() -> None:
    """Print the ratios."""
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--sequence-parallel", action="store_true")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--iterations", type=int, default=14)
    p.add_argument("--repeats", type=int, default=7)
    args = p.parse_args()
    more = ["--sequence-parallel"] if args.sequence_parallel else []
    for number in range(1, args.rounds + 1):
        seconds, size = round_of(more, args.iterations, args.repeats)
        low, high = min(seconds), max(seconds)
        print(
            f"round {number}: measured / predicted seconds: median {statistics.median(seconds):.3f}"
            f" ({low:.3f} to {high:.3f}) of {len(seconds)} iterations; bytes: median"
            f" {statistics.median(size):.4f} ({min(size):.4f} to {max(size):.4f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
