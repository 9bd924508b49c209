"""Large clusters: what planning gains there, and what planning and programs take.

    python benchmarks/paper/scale.py
    python benchmarks/paper/scale.py --devices 64 4096 --simulations 4

128 layers of width 12,288 on described servers of eight H200 devices, four samples of the published
mixture to a device, up to 8,192 tokens. Times of an iteration are multiples of perfect balance: of
the plans that are decided on, and of the best even layout for whole packed samples under 1F1B and
under zero bubble, tuned over the very batches (docs/simulator.md). Then processor seconds of this
machine: a decision (the first of a run, and the median of the others), and the program of one
iteration: to make it (place, write, validate, go through its memory), to pack it for all devices,
and its bytes, for one device in the middle and for all. Much beyond 256 devices it takes long: most
of it a run's first decision, which looks at many numbers of stages.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.cluster.cluster import load
from megatron_flex.data.bar import progress_bar
from megatron_flex.planner.build import Batch
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.lookahead import Lookahead
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.package import digest, pack
from megatron_flex.planner.plan import PlanError
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.presets import model
from megatron_flex.planner.ways import micro_batches, ways
from megatron_flex.simulator.presets import STATIC, open_cut
from megatron_flex.simulator.setting import Setting, place, prediction
from megatron_flex.simulator.sources import Lengths, Mixture
from megatron_flex.simulator.static import tune

DEVICES = (64, 256, 1024, 4096)
WHOLE = ("packed-1f1b", "packed-zero-bubble")


@dataclass(frozen=True)
class Planned:
    """Decisions one after the other, and the last one's program."""

    balance: float
    first: float
    later: float
    micro_batches: int
    stages: int
    make: float
    packing: float
    part: int
    whole: int


def setting_of(devices: int) -> Setting:
    """The model on so many devices."""
    cluster = replace(load("h200"), servers=devices // 8, devices_per_server=8)
    config = model("gpt-128")
    return Setting(config, cluster, closed_form_profile(config, cluster), PlannerOptions())


def planned(setting: Setting, batches: list[Lengths], simulations: int) -> Planned:
    """What a planner decides for each batch."""
    planner: Planner = setting.planner(schedule="zb", simulations=simulations)
    cut = open_cut(setting)
    windows = [ways(cut, lengths, setting.devices) for lengths in batches]
    lookahead = Lookahead(planner, planner.best_static(windows[:1]))
    pool, running, spent, total = Pool.empty(), None, [], 0.0
    for number in range(len(batches)):
        began = time.process_time()
        decision, pool = lookahead.decide_with(pool, windows[number : number + 4], running)
        spent.append(time.process_time() - began)
        batch = windows[number][decision.micro_batching]
        placed = place(planner.units, decision.plan, batch)
        assert placed is not None
        total += prediction(planner.units, decision.plan, batch, placed).seconds
        running = planner.running(decision.plan, batch)
    parts = micro_batches(cut, batches[-1], decision.plan.cut)
    begin = time.process_time()
    made = planner.maker.keep(decision.plan, Batch.of(parts, decision.plan.cut))
    ready = time.process_time()
    package = pack(made, "scale", digest(parts))
    done = time.process_time()
    sizes = sorted(map(len, package.parts))
    return Planned(
        total / sum(map(setting.balance, batches)), spent[0], statistics.median(spent[1:] or spent),
        len(parts), len(decision.plan.stages), ready - begin, done - ready,
        sizes[len(sizes) // 2], sum(sizes) + len(package.header),
    )  # fmt: skip


def whole(setting: Setting, name: str, batches: list[Lengths]) -> float | None:
    """A tuned baseline; ``None`` where nothing fits."""
    try:
        found = tune(STATIC[name].runners(setting, batches), batches, batches)
    except PlanError:
        return None
    return found.seconds * len(batches) / sum(map(setting.balance, batches))


def rows(args: argparse.Namespace) -> Iterator[str]:
    """A row for each size."""
    yield (
        "| devices | samples | micro-batches | stages | planned | 1F1B, packed"
        " | zero bubble, packed"
        " | first decision | later ones | program | packing | a device's part | all parts |"
    )
    yield "|---" * 13 + "|"
    with progress_bar(len(args.devices) * (1 + len(WHOLE)), "scale", unit=" parts") as bar:
        for devices in args.devices:
            setting = setting_of(devices)
            source = Mixture(args.samples * devices, longest=8192)
            batches = [source.batch(number) for number in range(args.batches)]
            own = planned(setting, batches, args.simulations)
            bar.update(1)
            cells = [f"{devices:,}", f"{args.samples * devices:,}", f"{own.micro_batches:,}",
                     f"{own.stages}", f"{own.balance:.2f}"]  # fmt: skip
            for name in WHOLE:
                other = whole(setting, name, batches[:1])
                cells.append("-" if other is None else f"{other:.2f}")
                bar.update(1)
            spent = (own.first, own.later, own.make, own.packing)
            cells += [f"{seconds:.2f} s" for seconds in spent]
            cells += [f"{own.part / 1e3:.1f} KB", f"{own.whole / 1e6:.2f} MB"]
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--devices", type=int, nargs="+", default=list(DEVICES))
    parser.add_argument("--samples", type=int, default=4, help="to a device")
    parser.add_argument("--batches", type=int, default=3, help="that are planned, one by one")
    parser.add_argument("--simulations", type=int, default=8, help="of a decision")
    args = parser.parse_args()
    if any(devices < 8 or devices % 8 for devices in args.devices):
        parser.error("--devices are whole servers of eight")
    for row in rows(args):
        print(row, flush=True)


if __name__ == "__main__":
    main()
