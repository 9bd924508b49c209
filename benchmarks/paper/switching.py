"""Figure 10: what switches cost in each way of switching, on the described testbed.

    python benchmarks/paper/switching.py
    python benchmarks/paper/switching.py --iterations 1000 --plot figure10.svg

First a single switch (figure 10c): four stages become two, on four devices in one server, two, and
four. The paper does not say which switch it measured; in this one every device needs the half of
its new stage that it does not hold. Its FlexPipe hands state over after the update, through
TwinLayers: *hand over* here. *Join early* is what this project does where a device has room: all
travels during the running iteration. Then whole runs (figures 10a and 10b): the paper's planner
decides over batches of the length mixture, 32 samples, and its decisions are priced in every way.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.paper.common import FIGURES, MODELS, SAMPLES
from megatron_flex.cluster.cluster import Cluster, Link, load
from megatron_flex.data.bar import shown
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.presets import PAPER_DEVICES, model
from megatron_flex.planner.static import static_plan
from megatron_flex.planner.switching import Move, switch
from megatron_flex.planner.ways import ways
from megatron_flex.simulator.changes import stall_seconds
from megatron_flex.simulator.presets import PLANNED, open_cut
from megatron_flex.simulator.run import PlannedRun, Span
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.sources import Mixture
from megatron_flex.simulator.summary import Summary

WAYS = {
    "live": ("join early", None),
    "handover": ("hand over", "FlexPipe"),
    "no-twin-layers": ("no TwinLayers", "without_TwinLayer"),
    "stall": ("iteration stalls", "iteration_stalling"),
    "restart": ("suspend, resume", "suspend_resume"),
}
"""Our ways, and the paper's bars."""
FORMS = {"intra_node_1x4": (1, 4), "mixed_2x2": (2, 2), "inter_node_4x1": (4, 1)}
"""Servers and devices of each."""
RECEIVED = "received"
SINGLE = ("bert-24", "bert-96", "gpt-3.35b")
LENGTHS = (1024, 4096)


def four(servers: int, devices: int) -> Cluster:
    """Four devices of the testbed; those of a server share its network."""
    whole = load("a100")
    share = whole.devices_per_server / devices
    inter = Link(whole.inter.bytes_per_second * share, whole.inter.latency)
    name = f"a100, {servers} x {devices}"
    return replace(whole, name=name, servers=servers, devices_per_server=devices, inter=inter)


def setting(name: str, cluster: Cluster) -> Setting:
    """A model of the paper's on a cluster."""
    config = model(name)
    return Setting(config, cluster, closed_form_profile(config, cluster))


def single() -> dict[tuple[str, str], dict[str, float]]:
    """Seconds of one switch by form of the cluster, model, and way; and bytes that are received."""
    found = {}
    for form, shape in FORMS.items():
        for name in SINGLE:
            where = setting(name, four(*shape))
            planner = where.planner(schedule="1f1b")
            deep, flat = (static_plan(where.config, n, 4) for n in (4, 2))
            lengths = Mixture(SAMPLES, longest=1024).batch(0)
            batch = ways(open_cut(where), lengths, 4)[0]
            running = planner.running(deep, batch)
            found[form, name] = {
                way: stall_seconds(planner.units, running, flat, way) for way in WAYS
            } | {RECEIVED: received(switch(planner.units, running, flat, "handover").moves)}
    return found


def received(moves: Iterable[Move]) -> float:
    """Most bytes that any device receives."""
    sizes: dict[int, float] = defaultdict(float)
    for move in moves:
        sizes[move.device] += move.size
    return max(sizes.values())


def single_rows(found: dict[tuple[str, str], dict[str, float]]) -> Iterator[str]:
    """A row each, the paper's in brackets."""
    ways_ = " | ".join(w for w, _ in WAYS.values())
    yield f"| servers × devices | model | a device receives | {ways_} |"
    yield "|---|---|---|" + "---|" * len(WAYS)
    for (form, name), row in found.items():
        data = FIGURES["figure10c_switch_stall_s"][form]
        cells = [f"{row[RECEIVED] / 1e9:.1f} GB"]
        for way, (_, bar) in WAYS.items():
            paper = "" if bar is None else f" ({data[bar][SINGLE.index(name)]:g})"
            cells.append(f"{row[way]:.2f} s{paper}")
        servers, devices = FORMS[form]
        yield f"| {servers} × {devices} | {MODELS[name]} | {' | '.join(cells)} |"


@dataclass(frozen=True)
class Run:
    """Totals of a run in one way."""

    name: str
    longest: int
    way: str
    summary: Summary


def runs(iterations: int) -> list[Run]:
    """Every model, length and way."""
    cases = [(n, longest, way) for longest in LENGTHS for n in MODELS for way in WAYS]
    found = []
    for name, longest, way in shown(cases, "runs", unit=" runs"):
        where = setting(name, load(f"a100x{PAPER_DEVICES[name]}"))
        span = Span(Mixture(SAMPLES, longest=longest), iterations)
        preset = replace(PLANNED["hbsa"], switch=way)
        run = PlannedRun(where, span, preset)
        found.append(Run(name, longest, way, Summary.of([run.step(k) for k in range(iterations)])))
    return found


def run_rows(found: list[Run]) -> Iterator[str]:
    """Time in each way over that of handing over, the paper's in brackets."""
    others = [way for way in WAYS if way != "handover"]
    yield (
        "| longest | model | seconds | a switch every |"
        f" {' | '.join(WAYS[way][0] for way in others)} |"
    )
    yield "|---|---|---|---|" + "---|" * len(others)
    for longest in LENGTHS:
        data = FIGURES[f"figure10_training_time_s_max_length_{longest}"]
        for name in MODELS:
            rows = {r.way: r.summary for r in found if (r.name, r.longest) == (name, longest)}
            own, place = rows["handover"], data["models"].index(MODELS[name])
            cells = []
            for way in others:
                bar = WAYS[way][1]
                paper = (
                    "" if bar is None else f" ({data[bar][place] / data['FlexPipe'][place]:.2f})"
                )
                cells.append(f"{rows[way].seconds / own.seconds:.3f}{paper}")
            every = f"{own.iterations / own.switches:.0f}" if own.switches else "never"
            yield (
                f"| {longest} | {MODELS[name]} | {own.seconds:,.1f} | {every} |"
                f" {' | '.join(cells)} |"
            )


def plot(found: dict[tuple[str, str], dict[str, float]], path: Path) -> None:
    """Figure 10c: bars of ours, dots of the paper's."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "paper"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), sharey=True, layout="constrained")
    for axis, form in zip(axes, FORMS, strict=True):
        for number, (way, (label, bar)) in enumerate(WAYS.items()):
            at = [k + 0.16 * (number - 2) for k in range(len(SINGLE))]
            axis.bar(at, [max(found[form, n][way], 1e-3) for n in SINGLE], 0.15, label=label)
            if bar is not None:
                axis.plot(at, FIGURES["figure10c_switch_stall_s"][form][bar], "k.", ms=4)
        axis.set_yscale("log")
        axis.set_xticks(range(len(SINGLE)), [MODELS[n] for n in SINGLE], size=8)
        servers, devices = FORMS[form]
        axis.set_title(f"servers × devices: {servers} × {devices}", size=9)
        axis.grid(alpha=0.3, axis="y")
    axes[0].set_ylabel("seconds of a switch (dots: the paper)", size=8)
    axes[0].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--iterations", type=int, default=200, help="of each run; 0: none")
    parser.add_argument("--plot", type=Path, help="write figure 10c to this SVG file")
    args = parser.parse_args()
    found = single()
    print("One switch, from four stages to two; the paper's seconds in brackets.\n")
    print("\n".join(single_rows(found)), flush=True)
    if args.plot:
        plot(found, args.plot)
    if args.iterations:
        print(f"\n{args.iterations} iterations; seconds by handing over, times it in other ways.\n")
        print("\n".join(run_rows(runs(args.iterations))))


if __name__ == "__main__":
    main()
