"""What it takes to make programs, and what a worker takes to read its part.

    python benchmarks/programs.py

Of GPT-3.35B (GPT-13B for 64 stages) on described devices: straight even stages, the searched
zero-bubble schedule, lognormal micro-batches. CPU time to make a program (place, write, validate,
go through its memory) and to pack it for all devices; then to read one part. Medians. The largest
takes some seconds a time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.planner.build import Batch
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.package import digest, pack, unpack
from megatron_flex.planner.presets import model
from megatron_flex.planner.static import static_plan
from megatron_flex.programs import described_maker

SIZES = ((8, 8, 44), (64, 8, 256), (64, 64, 256), (1024, 64, 4096))
BUDGET = 80_000_000_000


def measure(devices: int, stages: int, batches: int, repeats: int) -> list[tuple[float, ...]]:
    """Seconds to make, to pack, to read one part; bytes of that part and its instructions."""
    config = model("gpt-13b" if stages > 34 else "gpt-3.35b")
    plan = static_plan(config, stages, devices)
    maker = described_maker(config, devices, PlannerOptions(schedule="zb", budget=BUDGET))
    rows: list[tuple[float, ...]] = []
    for seed in range(repeats + 1):
        tokens = np.rint(np.random.default_rng(seed).lognormal(6.0, 0.8, batches))
        parts = [MicroBatch((Slice.all_of(i, int(n)),)) for i, n in enumerate(tokens)]
        batch = Batch.of(parts)
        begin = time.process_time()
        made = maker.keep(plan, batch)
        ready = time.process_time()
        package = pack(made, "benchmark", digest(parts))
        packed = time.process_time()
        own = package.parts[0]
        told = unpack(package.header, own, 0, "benchmark", parts)
        read = time.process_time()
        row = (ready - begin, packed - ready, read - packed, len(own), len(told.part.instructions))
        if seed:  # the first warms up
            rows.append(row)
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print("devices x stages x micro-batches   make    pack  read one part  bytes  instructions")
    for size in SIZES:
        columns = zip(*measure(*size, arguments.repeats), strict=True)
        make, packing, read, length, count = (statistics.median(column) for column in columns)
        name = " x ".join(map(str, size))
        print(f"{name:32s}{1e3 * make:6.1f}{1e3 * packing:8.1f}{1e3 * read:12.2f} ms"
              f"{length:8.0f}{count:11.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
