"""Simulated against real time of an iteration: two workers here, with a profile of the same run.

    python benchmarks/simulated.py                    about 10 minutes on two idle cores
    python benchmarks/simulated.py --data runs/demo/data --seq-length 4096 --batches 4 --cycles 32

Model, data and rows are those of benchmarks/pipelines.py, which says more of them: packing under
1F1B and ZB-V, DynaPipe's micro-batches, slices, and `flexpipe`, whose planner decides for every
batch. `switches` changes between two layouts after every iteration.

For each row: the median simulated and measured iteration, the median and quartiles of measured over
simulated, turn by turn, and the noise: how far iterations of exactly the same work (one batch, one
plan) are from their own median, in the middle and at the 90th percentile. A row is within the noise
where the median of measured over simulated is as near to 1 as the 90th percentile. Judge it on a
machine with two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch.multiprocessing as mp

from benchmarks.comparison import Found, Row, Turn
from benchmarks.pipelines import CPU, SLICED, Place, rows_of, turns_of, worker
from benchmarks.static_plans import other
from benchmarks.stdlib_data import StdlibData
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.machine import machine_name

ROWS = ("1f1b", "zb-v", "dynapipe", "slices", "flexpipe")
SWITCHES = "switches"


def switching(rows: Sequence[Row]) -> Row:
    """Two layouts in turn: straight, and in a V, with slices."""
    plans = {row.name: row.plan for row in rows}
    target = Plan.parse(plans["slices"]).cut
    both = tuple(other(plans[name], "zb", target) for name in ("1f1b", "zb-v"))
    return Row(SWITCHES, "real", "ours", both[0], SLICED, plans=both)


def changes(row: Row, batches: int, cycles: int) -> int:
    """Switches among the iterations that count."""
    turns = turns_of(row, batches, cycles)[-cycles:]
    layouts = [Plan.parse(row.plan_for(batch)).stages for batch in turns]
    return sum(a != b for a, b in pairwise(layouts))


def noise(turns: Sequence[Turn]) -> tuple[float, float]:
    """Distances of iterations of equal work from their median: in the middle, and at 90 %."""
    found = []
    for batch in {t.batch for t in turns}:
        same = [t.seconds for t in turns if t.batch == batch]
        found += [abs(seconds / median(same) - 1.0) for seconds in same]
    return median(found), quantiles(found, n=10)[-1]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="directory for the data set, to keep it")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--seq-length", type=int, default=2048, help="longer samples end there")
    parser.add_argument("--samples", type=int, default=12, help="of a global batch")
    parser.add_argument("--rows", nargs="+", choices=(*ROWS, SWITCHES), metavar="NAME",
                        default=[*ROWS, SWITCHES])  # fmt: skip
    parser.add_argument("--simulations", type=int, default=100, help="of a planner's decision")
    parser.add_argument("--batches", type=int, default=4, help="an even number, taken in turn")
    parser.add_argument("--cycles", type=int, default=32, help="iterations of each row")
    arguments = parser.parse_args()
    if arguments.batches % 2 or arguments.cycles < 2 * arguments.batches:
        parser.error("--batches is even, and each comes at least twice in --cycles")
    arguments.lengths, arguments.micro_batches = ["real"], [1]
    chosen, arguments.rows = arguments.rows, list(ROWS)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        place = Place(StdlibData(arguments.data or work / "data"), work, arguments)
        place.data.write()
        place.write_profile()
        rows = rows_of(place)
        rows = [row for row in (*rows, switching(rows)) if row.name in chosen]
        mp.spawn(worker, (place, rows), nprocs=2)
        found = Found.of(json.loads((work / "found.json").read_text()))
    print(f"{machine_name(CPU)}; {os.cpu_count()} cores; load {os.getloadavg()[1]:.1f}")
    print(f"{'':10}{'simulated':>10}{'measured':>10}{'measured / simulated':>22}"
          f"{'noise: p50':>12}{'p90':>8}{'switches':>10}")  # fmt: skip
    for number, row in enumerate(rows):
        turns = [t for t in found.turns if t.row == number]
        low, ratio, high = quantiles((t.seconds / t.simulated for t in turns), n=4)
        middle, most = noise(turns)
        times = [1e3 * median(getattr(t, name) for t in turns) for name in ("simulated", "seconds")]
        told = f"{ratio:.3f} ({low:.3f}-{high:.3f})"
        switches = changes(row, arguments.batches, arguments.cycles)
        verdict = "within" if abs(ratio - 1.0) <= most else "beyond"
        print(f"{row.name:10}{times[0]:7.0f} ms{times[1]:7.0f} ms{told:>22}{middle:12.1%}"
              f"{most:8.1%}{switches:10}  {verdict} the noise")  # fmt: skip
    print()
    for row in rows:
        print(f"{row.name:10}{row.shown}")


if __name__ == "__main__":
    main()
