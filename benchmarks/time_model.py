"""How well the planner's closed-form time agrees with the simulated schedule.

    python benchmarks/time_model.py [--instances 8000] [--json FILE]

Random models, devices, micro-batches and plans, some boundaries moved at random, without
communication: straight with equal degrees, and with the degrees that the exact search finds; in a
V; with fused backward (1F1B) and with split backward (zero bubble). Relative errors against the
event simulation: of the time model ``pipeline``, and of the refined estimate that picks what is
simulated (two waves through the stages, for fused backwards).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import astuple, dataclass, replace
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
from megatron_flex.planner.native_search import SearchProblem, v_steps
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.planner.plans import plan_of
from megatron_flex.planner.pricing import Pricer
from megatron_flex.planner.simulation import predict
from megatron_flex.planner.static import static_plan


@dataclass(frozen=True)
class Shape:
    """A kind of instance: straight or in a V, fused or split backward, degrees even or searched."""

    placement: str
    backward: str
    degrees: str


SHAPES = (
    Shape("straight", "fused", "even"),
    Shape("straight", "fused", "uneven"),
    Shape("straight", "split", "searched"),
    Shape("V", "split", "searched"),
)


@dataclass(frozen=True)
class Instance:
    """One comparison: seconds of the closed form, of the refined estimate, and simulated."""

    shape: Shape
    spread: float
    model: float
    refined: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative error of the closed form, signed."""
        return self.model / self.simulated - 1.0

    @property
    def refined_error(self) -> float:
        """Relative error of the refined estimate, signed."""
        return self.refined / self.simulated - 1.0


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
    options = PlannerOptions(schedule=schedule, memory_optimisation=False)
    profile = closed_form_profile(config, cluster)
    return ModelCosts(config, profile, cluster, options)


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


def even_plan(costs: ModelCosts, batch: Batch, stages: int) -> Plan:
    """Equal data-parallel degrees, cut by cost."""
    world = costs.num_devices
    work = list(map(float, costs.tables(batch).work))
    return static_plan(costs.config, stages, world, costs=work)


def draw_instance(seed: int) -> Instance | None:
    """Model and simulation of one random plan; ``None`` where the shape does not exist."""
    r = np.random.default_rng(seed)
    shape = SHAPES[seed % len(SHAPES)]
    split = shape.backward == "split"
    spread = (0.0, 0.4, 0.8)[seed // len(SHAPES) % 3]
    costs = draw_costs(r, "zb" if split else "1f1b", split)
    devices = costs.num_devices
    batch = draw_batch(r, devices, spread)
    pricer = Pricer(costs, batch)
    if shape.degrees == "even":
        plan = even_plan(costs, batch, int(r.choice([s for s in range(2, devices + 1)
                                                     if devices % s == 0])))  # fmt: skip
    else:
        tables = pricer.problem.tables
        front = None
        if shape.placement == "V":
            front = v_steps(tables.work, float(r.choice([0.35, 0.5, 0.65])))
        cut = SearchProblem(tables, front).search(int(r.integers(2, devices + 1)))
        if cut is None or len(cut.groups) < 2:
            return None
        plan = plan_of(tables, cut.groups)
        if len(set(plan.degrees)) == 1 and not split:
            return None
    price = pricer.price(disturb(r, plan))
    simulated = predict(costs, price.plan, batch, tries=4)
    assert simulated is not None
    return Instance(shape, spread, price.seconds, pricer.refined(price), simulated.seconds)


def run(instances: int, first: int = 0, progress: bool = True) -> list[Instance]:
    """``instances`` comparisons."""
    found = []
    for seed in tqdm(range(first, first + instances), disable=not progress, unit="instance"):
        instance = draw_instance(seed)
        if instance is not None:
            found.append(instance)
    return found


def summary(found: list[Instance]) -> list[dict[str, Any]]:
    """Median and 90th percentile of the absolute errors, for each kind of instance."""
    rows = []
    kinds = sorted({(astuple(i.shape), i.spread) for i in found})
    for kind in kinds:
        own = [i for i in found if (astuple(i.shape), i.spread) == kind]
        row: dict[str, Any] = {
            "placement": own[0].shape.placement,
            "backward": own[0].shape.backward,
            "degrees": own[0].shape.degrees,
            "spread": kind[1],
            "instances": len(own),
        }
        for name, errors in (
            ("model", [i.error for i in own]),
            ("refined", [i.refined_error for i in own]),
        ):
            size = np.abs(errors)
            row[f"{name}_median"] = float(np.median(size))
            row[f"{name}_p90"] = float(np.percentile(size, 90))
            row[f"{name}_bias"] = float(np.median(errors))
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--instances", type=int, default=8000, help="random instances")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    rows = summary(run(args.instances))
    print("| placement | backward | degrees | σ(ln size) | instances | closed form: median | p90 |"
          " bias | refined: median | p90 | bias |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            "| {placement} | {backward} | {degrees} | {spread} | {instances} | {model_median:.1%} |"
            " {model_p90:.1%} | {model_bias:+.1%} | {refined_median:.1%} | {refined_p90:.1%} |"
            " {refined_bias:+.1%} |".format(**row)
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
