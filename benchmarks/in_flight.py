"""How 1F1B uses its limit of forwards in flight where stages have different degrees.

    python benchmarks/in_flight.py [--plans 2400]

Random models, micro-batches and plans whose data-parallel degrees are not all equal, cut by cost,
as benchmarks/time_model.py draws them. Each is simulated in four ways; printed are the means of
time (and of the fullest device's activations), each as a part of the first way's:

    backward first    with the smaller limit (a lean plan's);
    in turn, lean     a forward after a backward and a backward after a forward, the same limit;
    in turn, room     with room for micro-batches that arrive out of step, what is used;
    in turn, none     without a limit.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.time_model import disturb, draw_batch, draw_costs
from megatron_flex.planner.plan import OPlan, Plan, Stage
from megatron_flex.planner.simulation import op_costs
from megatron_flex.planner.static import static_plan
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.list_scheduler import simulate
from megatron_flex.schedule.policies.one_f_one_b import ONE_F_ONE_B
from megatron_flex.schedule.policies.policy import Limits

SPREADS = (0.0, 0.4, 0.8)
BACKWARD_FIRST = replace(ONE_F_ONE_B, alternate=False)
UNLIMITED = replace(ONE_F_ONE_B, limits=Limits.none)


def drawn(seed: int) -> tuple[float, Plan, OpCosts] | None:
    """The spread of sizes, a plan and its costs; ``None`` where all degrees came out equal."""
    r = np.random.default_rng(seed)
    spread = SPREADS[seed % len(SPREADS)]
    costs = draw_costs(r, "1f1b", False)
    devices = costs.num_devices
    batch = draw_batch(r, devices, spread)
    if devices < 3:
        return None
    stages = int(r.integers(2, devices))
    cuts = np.sort(r.choice(np.arange(1, devices), stages - 1, replace=False))
    groups = [tuple(range(a, b)) for a, b in pairwise([0, *map(int, cuts), devices])]
    if len({len(group) for group in groups}) == 1:
        return None
    # A stage of d replicas gets d devices' worth of the work.
    work = list(map(float, costs.tables(batch).work))
    whole = static_plan(costs.config, devices, devices, costs=work)
    plan = Plan(
        tuple(
            Stage(whole.stages[g[0]].start, whole.stages[g[-1]].stop, g) for g in groups
        )
    )  # fmt: skip
    plan = disturb(r, plan)
    return spread, plan, op_costs(costs, plan, batch)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--plans", type=int, default=2400, help="random draws")
    arguments = parser.parse_args()
    found = defaultdict(list)
    for seed in range(arguments.plans):
        case = drawn(seed)
        if case is None:
            continue
        spread, plan, costs = case
        lean = Plan(plan.stages, OPlan(lean=True))
        first, *others = (
            simulate(layout, costs, rule)
            for layout, rule in (
                (lean, BACKWARD_FIRST),
                (lean, ONE_F_ONE_B),
                (plan, ONE_F_ONE_B),
                (plan, UNLIMITED),
            )
        )
        found[spread].append(
            [(p.makespan / first.makespan, max(p.peak) / max(first.peak)) for p in others]
        )
    print(
        "| σ(ln size) | plans | in turn, smaller limit | in turn, with room | in turn, no limit |"
    )
    print("|---|---|---|---|---|")
    for spread, rows in sorted(found.items()):
        means = np.array(rows).mean(axis=0)
        cells = " | ".join(f"{time:.3f} ({memory:.2f})" for time, memory in means)
        print(f"| {spread} | {len(rows)} | {cells} |")


if __name__ == "__main__":
    main()
