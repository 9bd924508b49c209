"""What a plan for every iteration can gain over the best static one at most, and where time goes.

    python benchmarks/paper/throughput.py --output runs/paper       # simulates
    python benchmarks/paper/bounds.py --output runs/paper           # reads what it left

For the GPTs of figures 8 and 9, as multiples of perfect balance (all work of the tokens, without
fixed costs, divided by all devices), sums over the iterations:

- *static*, *flexpipe*: what they take;
- where flexpipe's time goes, means over the devices that hold a stage: *work*, of it *fixed* (what
  the tokens do not explain: costs of operations that do not grow with them, and recompute),
  *bubble*, *messages*, *reductions* that nothing hides, *update*, *switches*;
- *order*: what no order of the chosen plans' operations could beat;
- *any plan*: the least that the exact search finds over all ways of cutting a batch, all contiguous
  layouts and some in a V, by the closed form, which is seldom above the simulation
  (docs/planner.md);
- *gain*: static over flexpipe; *most*: static over *any plan*.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.gain import bound
from benchmarks.paper.common import MODELS, Place, figure8, figure9
from megatron_flex.data.bar import shown
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.ways import batch_of, ways
from megatron_flex.simulator.presets import PLANNED, open_cut
from megatron_flex.simulator.run import options_of
from megatron_flex.simulator.setting import Setting
from tools.simulate import parser, setting_of

COLUMNS = (
    "static", "flexpipe", "work", "fixed", "bubble", "messages", "reductions", "update", "switches",
    "order", "any plan",
)  # fmt: skip


def records(directory: Path, name: str) -> list[dict[str, Any]]:
    """The iterations of a configuration; none if it has not been simulated."""
    file = directory / f"{name}.jsonl"
    lines = file.read_text().splitlines()[1:] if file.exists() else []
    return [json.loads(line) for line in lines]


def least_of_order(setting: Setting, planner: Planner, record: dict[str, Any]) -> float:
    """Seconds that no order of a decided plan's operations could beat."""
    plan = Plan.parse(record["plan"])
    batch = batch_of(open_cut(setting), record["lengths"], plan.cut)
    found = planner.predicted(plan, batch)
    assert found is not None  # only a finite stop gives None
    return bound(found) + record["seconds-host"]


def least_of_all(setting: Setting, planner: Planner, lengths: Sequence[int]) -> float:
    """Seconds of the closed form's best plan and way of cutting."""
    finder = planner.finder(ways(open_cut(setting), lengths, setting.devices))
    return min(c.price.seconds for c in finder.searched(None) if c.price.fits)


def row(place: Place, directory: Path) -> str | None:
    """A line of the table; ``None`` if it has not been simulated."""
    own, static = (records(directory / place.slug, n) for n in ("flexpipe", "static-slices"))
    if not own or len(own) != len(static):
        return None
    setting = setting_of(parser().parse_args(place.words(len(own))))
    planner = setting.planner(**options_of(PLANNED["flexpipe"]))

    def total(name: str, of: Sequence[dict[str, Any]] = own) -> float:
        return sum(float(r.get(name, 0.0)) for r in of)

    perfect = total("seconds-perfect")
    order = sum(least_of_order(setting, planner, record) for record in own)
    free = sum(least_of_all(setting, planner, record["lengths"]) for record in own)
    cells = [
        total("elapsed", static), total("elapsed"), total("seconds-compute"),
        total("seconds-balanced") - perfect, total("seconds-bubble"), total("seconds-message"),
        total("seconds-reduce"), total("seconds-update"), total("switch-stall"),
        order, free,
    ]  # fmt: skip
    text = " | ".join(f"{c / perfect:.3f}" for c in cells)
    gains = f"{cells[0] / cells[1]:.3f} | {cells[0] / free:.3f}"
    return f"| {place} | {text} | {gains} |"


def rows(places: Sequence[Place], directory: Path) -> Iterator[str]:
    """The table."""
    yield f"| multiples of perfect balance | {' | '.join(COLUMNS)} | gain | most |"
    yield "|---|" + "---|" * (len(COLUMNS) + 2)
    for place in shown(places, "bounds", unit=" settings"):
        line = row(place, directory)
        if line is not None:
            yield line


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    gpts = [name for name in MODELS if name.startswith("gpt")]
    arguments.add_argument("--models", nargs="+", choices=gpts, default=gpts)
    arguments.add_argument("--output", type=Path, default=Path("runs/paper"))
    args = arguments.parse_args()
    places = dict.fromkeys((*figure8(args.models), *figure9(args.models)))
    for line in rows(list(places), args.output):
        print(line, flush=True)


if __name__ == "__main__":
    main()
