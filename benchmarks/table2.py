"""The paper's Table 2, row by row: its plans against those of HBSA on the described testbed.

    python benchmarks/table2.py

Each row is planned with the paper's totals (M_peak as a line in the maximum length, 80 GB
devices), its time model (eq. 1), whole layers, and 16 micro-batches of the row's maximum length. A
row with an O_plan can only have come from a layout with that many stages, so it is the current
plan; a row without one is planned from the start, and from the layout of the row before it. "flat"
takes all links as fast as those within a server, which the paper's cost does not distinguish.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.cluster.cluster import load
from megatron_flex.planner.build import Batch
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.decision import Decision
from megatron_flex.planner.hbsa import Hbsa, PeakFit
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.presets import PAPER_DEVICES, model
from megatron_flex.planner.switching import Running

DATA = ROOT / "tests" / "data" / "paper_table2.json"
MICRO_BATCHES = 16
GB = 1e9


@dataclass(frozen=True)
class Row:
    """One row of the table: what the paper prints."""

    model: str
    longest: int
    degrees: tuple[int, ...]
    peak: float
    recomputed: float
    offloaded: float

    @property
    def optimised(self) -> float:
        """r + s in GB."""
        return self.recomputed + self.offloaded


@dataclass(frozen=True)
class Result:
    """One decision: from which layout, and what came out."""

    row: Row
    current: tuple[int, ...] | None
    flat: bool
    decision: Decision


def rows() -> list[Row]:
    """The table."""
    data = json.loads(DATA.read_text())
    return [Row(m, n, tuple(d), p, r, s) for m, n, d, p, (r, s) in data["rows"]]


def fits() -> dict[str, PeakFit]:
    """M_peak of each model."""
    data = json.loads(DATA.read_text())
    return {m: PeakFit(fixed * GB, slope * GB) for m, (fixed, slope) in data["fits"].items()}


@cache
def planner(name: str, flat: bool) -> Hbsa:
    """HBSA with the paper's model and totals."""
    cluster = load(f"a100x{PAPER_DEVICES[name]}")
    if flat:
        cluster = replace(cluster, inter=cluster.intra)
    config = model(name)
    options = PlannerOptions(planner="hbsa", time_model="paper", unit="layer")
    front = Planner(config, closed_form_profile(config, cluster), cluster, options)
    return Hbsa(front, fits()[name], 80 * GB)


def batch(longest: int) -> Batch:
    """Equal micro-batches of one sample each."""
    tokens = np.full(MICRO_BATCHES, float(longest))
    return Batch(tokens, tokens**2)


def plan_with(hbsa: Hbsa, degrees: Sequence[int], work: Batch) -> Plan:
    """The layout with these degrees whose layers are cut as evenly as they allow."""
    points = hbsa.layers.costs.points
    seconds = hbsa.layers.costs.tables(work).work
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (0.0, ())}
    for stage, degree in enumerate(degrees):
        for end in range(stage + 1, len(seconds) + 1):
            options = [
                (max(best[stage, a][0], float(sums[end] - sums[a]) / degree), best[stage, a][1])
                for a in range(stage, end)
                if (stage, a) in best
            ]
            if options:
                worst, cuts = min(options)
                best[stage + 1, end] = (worst, (*cuts, end))
    cuts = (0, *best[len(degrees), len(seconds)][1])
    device, stages = 0, []
    for (a, b), degree in zip(pairwise(cuts), degrees, strict=True):
        stages.append(Stage(points[a], points[b], tuple(range(device, device + degree))))
        device += degree
    return Plan(tuple(stages))


def decide(row: Row, current: tuple[int, ...] | None, flat: bool) -> Result:
    """HBSA's answer for one row."""
    hbsa = planner(row.model, flat)
    now = batch(row.longest)
    running = None
    if current is not None:
        plan = plan_with(hbsa, current, now)
        # The iteration before was half as long: so much memory was free for early copies.
        before = batch(row.longest // 2)
        spare = 80 * GB - fits()[row.model](row.longest / 2) / len(current)
        free = (max(0.0, spare),) * hbsa.units.cluster.world_size
        running = Running(plan, hbsa.seconds(before, plan), free)
    return Result(row, current, flat, hbsa.decide(now, running, float(row.longest)))


def results(flat: bool) -> list[Result]:
    """Every row from every layout that it may have come from."""
    found = []
    before: Row | None = None
    for row in rows():
        froms: list[tuple[int, ...] | None] = []
        if row.optimised or (before and before.longest > row.longest and before.model == row.model):
            froms.append(row.degrees)  # an O_plan, or the second 2,560: this layout was there
        else:
            froms.append(None)
            if before and before.model == row.model:
                froms.append(before.degrees)
        found += [decide(row, current, flat) for current in froms]
        before = row
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False).parse_args()
    print("| model | length | paper | from | links | HBSA | r + s GB (paper) | conditions |")
    print("|---|---|---|---|---|---|---|---|")
    for flat in (False, True):
        for r in results(flat):
            d, row = r.decision, r.row
            saved = (d.predicted.recomputed_bytes + d.predicted.offloaded_bytes) / GB
            conditions = ", ".join(
                f"{'' if c.holds else 'not '}{c.condition}"
                + (f": {c.sides}" if c.condition == "D" else "")
                for c in d.reasons
            )
            print(
                f"| {row.model} | {row.longest} | {row.degrees} | {r.current or 'start'} |"
                f" {'flat' if flat else 'testbed'} | {d.action.symbol} {d.plan.degrees} |"
                f" {saved:.1f} ({row.optimised:.0f}) | {conditions} |"
            )


if __name__ == "__main__":
    main()
