"""What the device model leaves uncertain: peak, links and overheads 30 % lower and higher.

    python benchmarks/paper/sensitivity.py --output runs/sensitivity --jobs 2

FlexPipe and its baselines, all tuned anew, on the described testbed with one thing changed: how
many times as fast FlexPipe is as each.

- *compute*: speed of matrix products and attention;
- *links*: speed inside servers, between them, and to the host;
- *overheads*: the seconds of an operation that do not grow with its tokens, and links' latencies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.paper.common import Place, simulated
from megatron_flex.cluster.cluster import Cluster, Link, Rates, description, load
from megatron_flex.cluster.profile import KindProfile, Line, Profile
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.presets import model

NAMES = (
    "flexpipe", "static-slices", "dynapipe", "packed-1f1b", "packed-zero-bubble",
    "zero-bubble-pad", "tensor-parallel",
)  # fmt: skip
PLACES = (Place("gpt-3.35b", 16, 32, 2048), Place("gpt-13b", 32, 32, 2048))
CASES = [("as described", 1.0)] + [
    (name, factor) for name in ("compute", "links", "overheads") for factor in (0.7, 1.3)
]


def changed(cluster: Cluster, what: str, factor: float) -> Cluster:
    """The cluster with one thing changed."""
    if what == "compute":
        device = cluster.device
        rates = [
            Rates(tuple((size, rate * factor) for size, rate in r.points))
            for r in (device.matmul, device.attention)
        ]
        return replace(cluster, device=replace(device, matmul=rates[0], attention=rates[1]))

    def link(old: Link) -> Link:
        if what == "links":
            return Link(old.bytes_per_second * factor, old.latency)
        slower = factor if what == "overheads" else 1.0
        return Link(old.bytes_per_second, old.latency * slower)

    return replace(
        cluster, intra=link(cluster.intra), inter=link(cluster.inter), host=link(cluster.host)
    )


def with_overheads(profile: Profile, factor: float) -> Profile:
    """The profile with other fixed costs."""

    def line(old: Line) -> Line:
        return replace(old, fixed=old.fixed * factor)

    def kind(old: KindProfile) -> KindProfile:
        return replace(
            old,
            forward=line(old.forward),
            backward_input=line(old.backward_input),
            backward_weight=line(old.backward_weight),
        )

    return replace(profile, kinds={k: kind(old) for k, old in profile.kinds.items()})


def rows(args: argparse.Namespace) -> Iterator[str]:
    """A row for each setting and case."""
    rest = NAMES[1:]
    yield f"| setting | changed | FlexPipe, × balance | {' | '.join(rest)} |"
    yield "|---|---|---|" + "---|" * len(rest)
    for place in PLACES:
        for what, factor in CASES:
            directory = args.output / f"{what.replace(' ', '-')}-{factor}"
            directory.mkdir(parents=True, exist_ok=True)
            cluster = changed(load(f"a100x{place.devices}"), what, factor)
            file = directory / f"cluster-{place.devices}.yaml"
            file.write_text(yaml.safe_dump(description(cluster)))
            more = ["--cluster", str(file), "--tuning-batches", str(args.tuning_batches)]
            if what == "overheads":
                profile = with_overheads(closed_form_profile(model(place.model), cluster), factor)
                path = directory / f"{place.slug}.profile.json"
                path.write_text(profile.to_json())
                more += ["--profile", str(path)]
            found = simulated([place], NAMES, args.iterations, args.jobs, directory, more)[place]
            own = found["flexpipe"]
            cells = [f"{own.rate / found[n].rate:.2f}" if n in found else "-" for n in rest]
            said = what if factor == 1.0 else f"{what} × {factor}"
            yield f"| {place} | {said} | {own.balance:.2f} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--iterations", type=int, default=8, help="of every case")
    parser.add_argument("--tuning-batches", type=int, default=8, help="of static plans")
    parser.add_argument("--output", type=Path, default=Path("runs/sensitivity"))
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    print(f"{args.iterations} iterations of each case.\n")
    for row in rows(args):
        print(row, flush=True)


if __name__ == "__main__":
    main()
