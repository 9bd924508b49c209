"""How well iteration times are predicted: two workers, one core each, plans re-chosen throughout.

    python benchmarks/prediction.py [--profile FILE] [--iterations 60]

Each prediction is logged before its iteration. Printed are the median and 90th percentile of the
relative error, after the first ten iterations, of

    model      the cost model alone,
    corrected  the cost model times the median of measured over predicted of the last 16 iterations,
    naive      the time of the iteration before, times the ratio of the two batches' FLOPs.

"noise" is what no prediction can be better than: the spread of the times of iterations of exactly
the same work (as many samples of equal length), in a run of its own.

--profile takes a file of tools/profile_layers.py for the same model; without it the costs follow
from the described CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

ROOT = Path(__file__).resolve().parents[1]
WARM = 10

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 2048"
    " --max-position-embeddings 2048 --tokenizer-type NullTokenizer --vocab-size 4000"
).split()


def run(
    iterations: int, profile: str | None, directory: Path, data: tuple[str, ...] = ("--mock-data",)
) -> list[dict[str, float]]:
    """Train with the planner; the JSON objects of all iterations."""
    log = directory / "log.jsonl"
    log.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(ROOT / "pretrain_gpt.py"), *MODEL, *data, "--micro-batch-tokens", "1024",
        "--global-batch-size", "16", "--train-iters", str(iterations), "--lr", "1e-4",
        "--distributed-backend", "gloo", "--flexpipe", "--log-jsonl", str(log),
    ]  # fmt: skip
    if profile is not None:
        command += ["--flexpipe-profile", profile]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    lines = map(json.loads, log.read_text().splitlines())
    return [line for line in lines if line["event"] == "iteration"]


def same_work(directory: Path) -> tuple[str, ...]:
    """Flags for data whose samples all have 512 tokens."""
    prefix = directory / "equal"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for _ in range(2000):
        builder.add_document(torch.arange(512), [512])
    builder.finalize(f"{prefix}.idx")
    return "--data-path", str(prefix), "--split", "1,0,0"


def row(name: str, errors: list[float]) -> str:
    """One line of the table."""
    ordered = sorted(errors)
    high = ordered[int(0.9 * (len(ordered) - 1))]
    return f"{name:12}{100 * statistics.median(ordered):8.1f} %{100 * high:8.1f} %"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--profile")
    parser.add_argument("--iterations", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        lines = run(arguments.iterations, arguments.profile, Path(directory))
        data = same_work(Path(directory))
        same = run(arguments.iterations // 2 + WARM, arguments.profile, Path(directory), data)
    errors: dict[str, list[float]] = {"model": [], "corrected": [], "naive": []}
    for before, now in list(pairwise(lines))[WARM:]:
        guesses = {
            "model": now.get("predicted-uncorrected"),
            "corrected": now.get("predicted"),
            "naive": before["elapsed"] * now["flops"] / before["flops"],
        }
        for name, guess in guesses.items():
            if guess is not None:
                errors[name].append(abs(guess / now["elapsed"] - 1.0))
    times = [line["elapsed"] for line in same[WARM:]]
    errors["noise"] = [abs(t / statistics.median(times) - 1.0) for t in times]
    switches = sum(a["plan"] != b["plan"] for a, b in pairwise(lines))
    mean = statistics.mean(line["elapsed"] for line in lines)
    print(f"{len(lines)} iterations of {1e3 * mean:.0f} ms, {switches} switches")
    print(f"{'error':12}{'median':>10}{'p90':>10}")
    for name, values in errors.items():
        print(row(name, values))


if __name__ == "__main__":
    main()
