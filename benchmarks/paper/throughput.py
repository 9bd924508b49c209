"""Figures 8 and 9 on the described testbed, beside the paper's, and mixtures with long samples.

    python benchmarks/paper/throughput.py --output runs/paper --jobs 2
    python benchmarks/paper/throughput.py --figures 8 --models gpt-13b --iterations 8
    python benchmarks/paper/throughput.py --figures long --output runs/long --programs

Tokens a second, real ones, of FlexPipe and of baselines that are tuned as docs/simulator.md says;
what the paper measured is in brackets. Then how many times as fast FlexPipe is, the mean over the
settings (the mean of ratios, GPT and BERT apart), ours and the paper's. Simulations are kept in
``--output``, and gone on with.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.paper.common import (
    FIGURES,
    LONG,
    LONGEST,
    MODELS,
    PAPER_NAMES,
    SAMPLES,
    Found,
    Place,
    figure8,
    figure9,
    of_paper,
    simulated,
)

OURS = "flexpipe"
NAMES = (
    OURS, "static-slices", "dynapipe", "packed-1f1b", "packed-zero-bubble", "zero-bubble-pad",
    "megatron-pad", "bucket", "seq1f1b", "context-parallel", "tensor-parallel",
)  # fmt: skip
SLICED = (OURS, "static-slices", "seq1f1b")
"""What cuts samples."""
GOALS = {"static-slices": 1.05, "dynapipe": 1.5, "packed-1f1b": 1.8, "zero-bubble-pad": 2.2}
"""What FlexPipe is meant to be on GPTs, times as fast, on average."""


def lines(found: Found, names: Sequence[str]) -> Iterator[str]:
    """A row a setting."""
    yield f"| model × devices, samples, lengths | {' | '.join(names)} |"
    yield "|---|" + "---|" * len(names)
    for place, row in found.items():
        cells = []
        for name in names:
            own, paper = row.get(name), of_paper(name, place)
            text = "-" if own is None else f"{own.rate:,.0f}"
            cells.append(text if paper is None else f"{text} ({paper:,.0f})")
        yield f"| {place} | {' | '.join(cells)} |"


def balance(found: Found, names: Sequence[str]) -> Iterator[str]:
    """The same as multiples of perfect balance."""
    yield f"| multiples of perfect balance | {' | '.join(names)} |"
    yield "|---|" + "---|" * len(names)
    for place, row in found.items():
        cells = [f"{row[name].balance:.2f}" if name in row else "-" for name in names]
        yield f"| {place} | {' | '.join(cells)} |"


def ratios(found: Found, name: str, gpt: bool) -> list[float]:
    """Times as fast as a baseline in every setting."""
    return [
        row[OURS].rate / row[name].rate
        for place, row in found.items()
        if place.gpt == gpt and OURS in row and name in row
    ]


def paper_ratios(found: Found, name: str, gpt: bool) -> list[float]:
    """The paper's."""
    pairs = [(of_paper(OURS, p), of_paper(name, p)) for p in found if p.gpt == gpt]
    return [a / b for a, b in pairs if a and b]


def summary(found: Found, names: Sequence[str]) -> Iterator[str]:
    """How many times as fast."""
    yield "| FlexPipe against | GPT: mean (least, most) | paper | goal | BERT | paper |"
    yield "|---|---|---|---|---|---|"
    for name in names:
        if name == OURS:
            continue
        cells = [name]
        for gpt in (True, False):
            own, paper = ratios(found, name, gpt), paper_ratios(found, name, gpt)
            cells.append(
                f"{statistics.mean(own):.3f} ({min(own):.3f}, {max(own):.3f})" if own else "-"
            )
            cells.append(f"{statistics.mean(paper):.2f}" if paper else "")
            if gpt:
                cells.append(f"{GOALS[name]}" if name in GOALS else "")
        yield f"| {' | '.join(cells)} |"


def best_whole(found: Found) -> Iterator[str]:
    """Against the best of all that cut no sample."""
    for place, row in found.items():
        if OURS not in row:
            continue
        whole = {n: s.rate for n, s in row.items() if n not in SLICED}
        if whole:
            name = max(whole, key=whole.__getitem__)
            yield f"| {place} | {row[OURS].rate / whole[name]:.2f} × {name} |"


def plot(found: Found, path: Path) -> None:
    """Throughput of ours and the paper's, a row for each figure, a column for each model."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "paper"
    from matplotlib import pyplot

    models = [m for m in MODELS if any(p.model == m for p in found)]
    figures: tuple[tuple[str, str, Any], ...] = (
        ("figure 8", "maximum length", lambda p: p.samples == SAMPLES and p.longest),
        ("figure 9", "samples a batch", lambda p: p.longest == LONGEST and p.samples),
    )
    shown = [f for f in figures if len({f[2](p) for p in found if not p.share} - {False}) > 1]
    figure, grid = pyplot.subplots(
        2 * len(shown), len(models), figsize=(3.1 * len(models), 4.5 * len(shown)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for number, (title, label, at) in enumerate(shown):
        for column, name in enumerate(models):
            own = [p for p in found if p.model == name and not p.share and at(p)]
            own.sort(key=at)
            for part, axis in enumerate((grid[2 * number][column], grid[2 * number + 1][column])):
                for key, mark in zip(PAPER_NAMES, "osv^", strict=True):
                    points = [
                        (at(p), found[p][key].rate if part == 0 else of_paper(key, p))
                        for p in own
                        if key in found[p]
                    ]
                    if points:
                        axis.plot(*zip(*points, strict=True), f"{mark}-", label=key, ms=4)
                axis.set_xscale("log", base=2)
                axis.set_ylim(bottom=0)
                axis.grid(alpha=0.3)
                axis.set_title(f"{MODELS[name]}, {title}{', the paper' if part else ''}", size=9)
                axis.set_xlabel(label, size=8)
                axis.tick_params(labelsize=7)
    grid[0][0].legend(fontsize=7)
    grid[0][0].set_ylabel("tokens a second", size=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--figures", nargs="+", choices=["8", "9", "long"], default=["8", "9"])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--configurations", nargs="+", default=list(NAMES), metavar="NAME")
    parser.add_argument("--iterations", type=int, default=16, help="of every setting")
    parser.add_argument("--tuning-batches", type=int, default=8, help="of static plans")
    parser.add_argument("--programs", action="store_true",
                        help="decisions look at whole programs: memory is exact")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("runs/paper"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="write the curves to this SVG file")
    args = parser.parse_args()
    places: list[Place] = []
    if "8" in args.figures:
        places += figure8(args.models)
    if "9" in args.figures:
        places += figure9(args.models)
    if "long" in args.figures:
        places += [p for p in LONG if p.model in args.models]
    names = args.configurations
    more = ["--tuning-batches", str(args.tuning_batches)] + ["--programs"] * args.programs
    found = simulated(places, names, args.iterations, args.jobs, args.output, more)
    print(f"{args.iterations} iterations of each setting; the testbed is {FIGURES['testbed']}\n")
    for part in (lines(found, names), balance(found, names), summary(found, names)):
        print("\n".join(part), end="\n\n")
    print("| setting | against the best without slices |\n|---|---|")
    print("\n".join(best_whole(found)))
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
