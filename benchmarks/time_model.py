"""How well the planner's closed-form time agrees with the simulated schedule.

    python benchmarks/time_model.py [--instances 5000] [--json FILE]

Random models, devices, micro-batches and plans (the best cut for a random number of stages, then
some boundaries moved at random), straight and in a V, with fused and with split backward, without
communication. Prints the median and the 90th percentile of the relative error of the time model
``pipeline`` against the event simulation.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.cluster.cluster import Cluster, Link, load
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.cost import plan_cost
from megatron_flex.planner.native_search import SearchProblem, v_steps
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.planner.plans import groups_of, plan_of
from megatron_flex.planner.simulation import predict


@dataclass(frozen=True)
class Instance:
    """One comparison: seconds of both, and what was compared."""

    shape: str
    backward: str
    spread: float
    model: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative error of the model, signed."""
        return self.model / self.simulated - 1.0


def ideal_cluster(devices: int) -> Cluster:
    """One server, messages and updates as good as free, memory without end."""
    free = Link(1e30, 0.0)
    base = load("a100")
    device = replace(base.device, memory=10**18, memory_bytes_per_second=1e30)
    return replace(
        base, servers=1, devices_per_server=devices, device=device, intra=free, inter=free,
        host=free, reserved=0,
    )  # fmt: skip


def draw_costs(r: np.random.Generator, schedule: str, split: bool) -> ModelCosts:
    """A random model on a random number of devices."""
    heads = int(r.integers(8, 33))
    config = ModelConfig(
        num_layers=int(r.integers(8, 41)),
        hidden_size=128 * heads,
        num_attention_heads=heads,
        vocab_size=int(r.choice([8000, 32000, 50000])),
        padded_vocab_size=51200,
        max_position_embeddings=1,
        ffn_hidden_size=int(128 * heads * r.uniform(2.0, 5.0)),
        kv_channels=128,
        num_query_groups=heads,
        position_embedding_type="rope",
    )
    devices = int(r.integers(2, 9))
    cluster = ideal_cluster(devices)
    options = PlannerOptions(schedule=schedule, split=split, memory_optimisation=False)
    profile = closed_form_profile(config, cluster)
    return ModelCosts(config, profile, cluster, options, tuple(range(devices)))


def draw_batch(r: np.random.Generator, devices: int, spread: float) -> Batch:
    """Micro-batches with lognormal sizes of standard deviation ``spread``, in the order in which
    the trainer cuts them: small ones first and last."""
    count = int(r.integers(2 * devices, 8 * devices + 1))
    tokens = np.rint(2048 * np.exp(spread * r.standard_normal(count))).clip(16)
    up = np.sort(tokens)
    tokens = np.concatenate([up[::2], up[1::2][::-1]])
    return Batch(tokens, tokens * float(r.uniform(200, 2000)))


def disturb(r: np.random.Generator, plan: Plan) -> Plan:
    """Move some boundaries by a unit or two."""
    cuts = [s.start for s in plan.stages[1:]]
    for i in range(len(cuts)):
        low = (cuts[i - 1] if i else 0) + 1
        high = (cuts[i + 1] if i + 1 < len(cuts) else plan.num_units) - 1
        cuts[i] = int(np.clip(cuts[i] + r.integers(-2, 3) * (r.random() < 0.3), low, high))
    ends = [0, *cuts, plan.num_units]
    return Plan(
        tuple(Stage(a, b, s.group) for a, b, s in zip(ends, ends[1:], plan.stages, strict=False))
    )


def draw_instance(seed: int) -> Instance | None:
    """Model and simulation of one random plan; ``None`` where the shape does not exist."""
    r = np.random.default_rng(seed)
    shape = ("straight", "V")[seed % 4 == 3]
    split = shape == "V" or seed % 2 == 1
    spread = (0.0, 0.4, 0.8)[seed // 4 % 3]
    costs = draw_costs(r, "zb" if split else "1f1b", split)
    batch = draw_batch(r, len(costs.devices), spread)
    tables = costs.tables(batch)
    front = (
        None if shape == "straight" else v_steps(tables.work, float(r.choice([0.35, 0.5, 0.65])))
    )
    cut = SearchProblem(tables, front).search(int(r.integers(2, len(costs.devices) + 1)))
    if cut is None or len(cut.groups) < 2:
        return None
    plan = disturb(r, plan_of(tables, cut.groups))
    model = plan_cost(tables, groups_of(tables, plan)).seconds
    simulated = predict(costs, plan, batch, tries=4)
    assert simulated is not None
    return Instance(shape, "split" if split else "fused", spread, model, simulated.seconds)


def run(instances: int, first: int = 0, progress: bool = True) -> list[Instance]:
    """``instances`` comparisons."""
    found = []
    for seed in tqdm(range(first, first + instances), disable=not progress, unit="instance"):
        instance = draw_instance(seed)
        if instance is not None:
            found.append(instance)
    return found


def summary(found: list[Instance]) -> list[dict[str, Any]]:
    """Median and 90th percentile of the absolute error, for each kind of instance."""
    rows = []
    kinds = sorted({(i.shape, i.backward, i.spread) for i in found})
    for kind in [*kinds, None]:
        errors = [i.error for i in found if kind is None or (i.shape, i.backward, i.spread) == kind]
        size = np.abs(errors)
        rows.append(
            {
                "shape": kind[0] if kind else "all",
                "backward": kind[1] if kind else "all",
                "spread": kind[2] if kind else "all",
                "instances": len(errors),
                "median": float(np.median(size)),
                "p90": float(np.percentile(size, 90)),
                "bias": float(np.median(errors)),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--instances", type=int, default=5000, help="random instances")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    rows = summary(run(args.instances))
    print("| shape | backward | σ(ln size) | instances | median error | 90th percentile | bias |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            "| {shape} | {backward} | {spread} | {instances} | {median:.1%} | {p90:.1%} |"
            " {bias:+.1%} |".format(**row)
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
