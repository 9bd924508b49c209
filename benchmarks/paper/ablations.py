"""What each part of FlexPipe gains, and figure 11 of the paper, on the described testbed.

    python benchmarks/paper/ablations.py --output runs/ablations --jobs 2
    python benchmarks/paper/ablations.py --iterations 4 --repeats 3

- How much longer a run takes without one part, in some settings (tools/simulate.py --list says what
  each leaves out).
- Figure 11a: the paper's planner with and without memory optimisation, samples up to 4,096 tokens.
  Few batches have one that long, so these runs are longer. The order of the paper's bars is
  doubtful; its ratios are by model as it prints them.
- Figure 11b: milliseconds of its planner with and without bounds, and of ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.paper.common import FIGURES, MODELS, Found, Place, simulated
from benchmarks.planner import speed_of
from megatron_flex.planner.presets import PAPER_DEVICES

PARTS = (
    "flexpipe", "flexpipe-untuned", "static-slices", "no-lookahead", "no-switches", "no-o-plan",
    "no-slices", "fused-backward", "whole-layers", "hbsa",
)  # fmt: skip
PLACES = (
    Place("gpt-3.35b", 16, 32, 8192),
    Place("gpt-3.35b", 16, 128, 8192),
    Place("gpt-13b", 32, 64, 8192),
    Place("bert-96", 8, 32, 2048),
    Place("gpt-13b", 16, 32, 65536, 0.05),
    Place("gpt-3.35b", 8, 64, 65536, 0.2),
)
HBSA = ("hbsa", "hbsa-no-o-plan")


def part_rows(found: Found, names: Sequence[str]) -> Iterator[str]:
    """Time of each, as a multiple of all of it."""
    rest = [name for name in names if name != "flexpipe"]
    yield f"| setting | FlexPipe, × balance | {' | '.join(rest)} |"
    yield "|---|---|" + "---|" * len(rest)
    for place, row in found.items():
        if "flexpipe" not in row:
            continue
        whole = row["flexpipe"]
        cells = [f"{row[n].seconds / whole.seconds:.3f}" if n in row else "-" for n in rest]
        yield f"| {place} | {whole.balance:.3f} | {' | '.join(cells)} |"


def memory_rows(found: Found) -> Iterator[str]:
    """Figure 11a."""
    yield "| model | tokens/s | without memory optimisation | times as fast | paper |"
    yield "|---|---|---|---|---|"
    data = FIGURES["figure11a_throughput"]
    for place, row in found.items():
        at = data["models"].index(MODELS[place.model])
        paper = data["FlexPipe"][at] / data["without_memory_optimisation"][at]
        rates = [f"{row[n].rate:,.0f}" if n in row else "fits nowhere" for n in HBSA]
        both = f"{row[HBSA[0]].rate / row[HBSA[1]].rate:.3f}" if len(row) == 2 else "-"
        yield f"| {place} | {rates[0]} | {rates[1]} | {both} | {paper:.2f} |"


def planner_rows(repeats: int) -> Iterator[str]:
    """Figure 11b."""
    yield "| model | HBSA | without bounds | exact search | whole decision, 2 simulations |"
    yield "|---|---|---|---|---|"
    data = FIGURES["figure11b_planner_ms"]
    for name, title in MODELS.items():
        at = data["models"].index(title)
        r = speed_of(name, repeats, 64, 1024)
        yield (
            f"| {title} | {r['hbsa']:.2f} ms ({data['HBSA'][at]:.0f}) |"
            f" {r['hbsa_unbounded']:.1f} ms ({data['HBSA_without_bounds'][at]:.0f}) |"
            f" {r['search']:.2f} ms | {r['decision']:.1f} ms |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--iterations", type=int, default=16, help="of every setting")
    parser.add_argument("--hbsa-iterations", type=int, default=100, help="of figure 11a")
    parser.add_argument("--tuning-batches", type=int, default=8, help="of static plans")
    parser.add_argument("--repeats", type=int, default=9, help="of each timing; 0: none")
    parser.add_argument("--output", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    more = ["--tuning-batches", str(args.tuning_batches)]
    found = simulated(PLACES, PARTS, args.iterations, args.jobs, args.output, more)
    print(f"{args.iterations} iterations of each setting; time over that of FlexPipe.\n")
    print("\n".join(part_rows(found, PARTS)), flush=True)
    places = [Place(m, PAPER_DEVICES[m], 32, 4096) for m in MODELS]
    found = simulated(places, HBSA, args.hbsa_iterations, args.jobs, args.output, more)
    print(f"\nFigure 11a, {args.hbsa_iterations} iterations.\n")
    print("\n".join(memory_rows(found)), flush=True)
    if args.repeats:
        print("\nFigure 11b; the paper's in brackets.\n")
        print("\n".join(planner_rows(args.repeats)))


if __name__ == "__main__":
    main()
