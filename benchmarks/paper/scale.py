"""Large clusters: what planning gains there, and what planning and programs take.

    python benchmarks/paper/scale.py
    python benchmarks/paper/scale.py --devices 64 4096 --batches 2

128 layers of width 12,288 on described servers of eight H200 devices, four samples of the published
mixture to a device, up to 8,192 tokens. Above 64 devices one device is planned for several
(docs/planner.md). Times of an iteration are multiples of perfect balance: of the plans that the
trainer's planner decides on, of the last one simulated on all devices with the whole batch, and of
the best even layout for whole packed samples under 1F1B and under zero bubble, tuned over the very
batch (docs/simulator.md). Then processor seconds of this machine: a run's first decision, and of
the later ones the median of first answers and of whole ones, and that as a part of the iteration;
and the program of one iteration: to make it (place, write, validate, go through its memory), to
pack it for all devices, and its bytes, for one device in the middle and for all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.cluster.cluster import description, load
from megatron_flex.data.bar import progress_bar
from megatron_flex.planner.build import Batch
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.messages import Question, Setup, Task
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.package import digest, pack
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.presets import model
from megatron_flex.planner.service import Service
from megatron_flex.planner.simulation import simulated
from megatron_flex.planner.thin import wide_plan
from megatron_flex.planner.ways import micro_batches, ways
from megatron_flex.simulator.presets import STATIC, open_cut
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.sources import Lengths, Mixture, Part
from megatron_flex.simulator.static import tune

DEVICES = (64, 128, 256, 512, 1024, 4096)
WHOLE = ("packed-1f1b", "packed-zero-bubble")
T = TypeVar("T")


@dataclass(frozen=True)
class Planned:
    """Decisions one after the other, and the last one's program; ``part``: of an iteration."""

    balance: float
    everywhere: float
    first: float
    soon: float
    later: float
    share: float
    micro_batches: int
    stages: int
    make: float
    packing: float
    part: int
    whole: int


def setting_of(devices: int) -> Setting:
    """The model on so many devices."""
    cluster = load(f"h200x{devices}")
    config = model("gpt-128")
    return Setting(config, cluster, closed_form_profile(config, cluster), PlannerOptions())


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """What it gives, and processor seconds."""
    began = time.process_time()
    return run(), time.process_time() - began


def service_of(setting: Setting, lengths: Lengths) -> Service:
    """The planner of a run whose static plan is the best even one for a batch."""
    thin, cut = setting.thinned, open_cut(setting)
    planner = thin.planner(schedule="auto")
    finder = planner.finder(ways(cut, lengths, thin.devices))
    even = [c for p in planner.even_plans if (c := finder.best_of(p, None)).price.fits]
    static = Plan(min(even, key=lambda c: c.price.seconds).plan.stages)
    options = PlannerOptions(schedule="auto", exact_memory=True, simulations=None)
    return Service(
        Setup(
            setting.config, description(setting.cluster), setting.profile.to_json(), options, cut,
            str(wide_plan(static, thin.width)),
        )
    )  # fmt: skip


def planned(setting: Setting, batches: list[Lengths], part: list[Lengths]) -> Planned:
    """What the planner decides for each batch; ``part``: what falls to the devices planned for."""
    service = service_of(setting, part[0])
    spent: list[float] = []
    soon: list[float] = []
    total, running, lengths = 0.0, None, batches[0]
    window = service.planner.options.lookahead
    for number in range(len(batches)):
        lengths = batches[number]
        known = tuple(batches[number : number + window])
        before = batches[number - 1] if number else ()
        question = Question(number, known, running, before)
        if number:
            soon.append(timed(partial(service.first, question))[1])
        answer, seconds = timed(partial(service.answer, question))
        spent.append(seconds)
        if answer.decision is None:
            raise PlanError(answer.problem)
        decision = answer.decision
        total += decision.predicted.seconds
        running = str(decision.plan)
    parts = micro_batches(open_cut(setting), lengths, decision.plan.cut)
    batch = Batch.of(parts, decision.plan.cut)
    found = simulated(service.planner.units, decision.plan, batch)
    assert found is not None
    task = Task("scale", str(decision.plan), lengths)
    made, make = timed(lambda: service.make(task, batch))
    package, packing = timed(lambda: pack(made, "scale", digest(parts)))
    sizes = sorted(map(len, package.parts))
    later = statistics.median(spent[1:] or spent)
    return Planned(
        total / sum(map(setting.balance, batches)), found[0] / setting.balance(lengths), spent[0],
        statistics.median(soon or spent), later, later / found[0], len(parts),
        len(decision.plan.stages), make, packing, sizes[len(sizes) // 2],
        sum(sizes) + len(package.header),
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
        "| devices | samples | micro-batches | stages | planned | the last on all devices"
        " | 1F1B, packed | zero bubble, packed | first decision | first answer | whole answer"
        " | of an iteration | program | packing | a device's part | all parts |"
    )
    yield "|---" * 16 + "|"
    with progress_bar(len(args.devices) * (1 + len(WHOLE)), "scale", unit=" parts") as bar:
        for devices in args.devices:
            setting = setting_of(devices)
            thin = setting.thinned
            source = Mixture(args.samples * devices, longest=8192)
            some = Part(source, thin.width, thin.cost, thin.devices)
            numbers = range(args.batches)
            batches = [source.batch(number) for number in numbers]
            parts = [some.batch(number) for number in numbers]
            own = planned(setting, batches, parts)
            bar.update(1)
            cells = [f"{devices:,}", f"{args.samples * devices:,}", f"{own.micro_batches:,}",
                     f"{own.stages}", f"{own.balance:.2f}", f"{own.everywhere:.2f}"]  # fmt: skip
            for name in WHOLE:
                other = None if args.no_baselines else whole(thin, name, parts[:1])
                cells.append("-" if other is None else f"{other:.2f}")
                bar.update(1)
            cells += [f"{seconds:.2f} s" for seconds in (own.first, own.soon, own.later)]
            cells.append(f"{own.share:.1%}")
            cells += [f"{seconds:.2f} s" for seconds in (own.make, own.packing)]
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
    parser.add_argument("--batches", type=int, default=5, help="that are planned, one by one")
    parser.add_argument("--no-baselines", action="store_true", help="planning only")
    args = parser.parse_args()
    if any(devices < 8 or devices % 8 for devices in args.devices):
        parser.error("--devices are whole servers of eight")
    for row in rows(args):
        print(row, flush=True)


if __name__ == "__main__":
    main()
