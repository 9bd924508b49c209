"""How fast the planner is, and what it would do over many iterations.

    python benchmarks/planner.py                     # speed, then growth
    python benchmarks/planner.py --actions 1000      # how often each action fires

Speed, in one run side by side: the exact straight search of one micro-batching, the whole decision
with its simulations, and the paper's HBSA with and without its bounds, for the paper's four models
on their numbers of A100; the search for 258 blocks on 1,024 devices; medians over batches of the
length mixture (CPU time of the one thread that it runs on). Growth: the search against devices and
against units; --plot writes the picture.

Actions: over batches of 16 and of 32 samples of the mixture, GPT-3.35B on 16 A100: how often HBSA
and the look-ahead keep, optimise memory, grow, shrink and migrate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.cluster.cluster import Cluster, load
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatches import CostCoefficients, cut_by_tokens
from megatron_flex.data.mock import mixture_lengths
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.build import Batch
from megatron_flex.planner.candidates import Finder
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.decision import Action
from megatron_flex.planner.flops import model_work, total_work
from megatron_flex.planner.hbsa import Hbsa, PeakFit
from megatron_flex.planner.lookahead import Lookahead
from megatron_flex.planner.native_search import SearchProblem
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.presets import PAPER_DEVICES, model
from megatron_flex.planner.switching import Running

WINDOW = 4  # batches that the look-ahead sees
PAPER_MS = {"bert-24": (3, 48), "bert-96": (15, 167), "gpt-3.35b": (17, 678), "gpt-13b": (25, 2087)}
"""Figure 11b: HBSA with and without bounds, milliseconds on the authors' machine."""


@dataclass(frozen=True)
class Timed:
    """Seconds of several runs."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Milliseconds, the median."""
        return 1e3 * statistics.median(self.seconds)


def timed(run: Callable[[], object], repeats: int) -> Timed:
    """CPU time of a call, after one that warms up: all of it runs on one thread."""
    run()
    found = []
    for _ in range(repeats):
        begin = time.process_time()
        run()
        found.append(time.process_time() - begin)
    return Timed(tuple(found))


def drawn(config: ModelConfig, seed: int, samples: int, budget: int) -> Batch:
    """A batch of the length mixture, cut by cost."""
    work = total_work(model_work(config))
    lengths = mixture_lengths(seed, np.arange(samples))
    batch = GlobalBatch(0, lengths, (int(lengths.sum()),))
    return Batch.of(cut_by_tokens(batch, budget, CostCoefficients(work.linear, work.quadratic)))


def planner_for(config: ModelConfig, cluster: Cluster, **options: object) -> Planner:
    """A planner with the closed-form profile and a split schedule."""
    given = PlannerOptions(**{"schedule": "zb-h1", **options})  # type: ignore[arg-type]
    return Planner(config, closed_form_profile(config, cluster), cluster, given)


def speed_of(name: str, repeats: int, samples: int, budget: int) -> dict[str, float]:
    """All times of one of the paper's models, milliseconds."""
    config, cluster = model(name), load(f"a100x{PAPER_DEVICES[name]}")
    planner = planner_for(config, cluster, simulations=2)
    costs = planner.units
    batches = [drawn(config, seed, samples, budget) for seed in range(repeats + 2)]
    running = planner.running(planner.decide([batches[0]], None).plan, batches[0])
    problems = [SearchProblem(costs.tables(b)) for b in batches]
    turn = iter(range(10**9))

    def next_batch() -> int:
        return next(turn) % len(batches)

    def new_batch() -> Batch:
        return replace(batches[next_batch()])  # nothing is known of it

    hbsa = Hbsa(planner_for(config, cluster, planner="hbsa", unit="layer"))
    stages = min(8, PAPER_DEVICES[name])
    search = timed(lambda: problems[next_batch()].search(), repeats)
    tables = timed(lambda: SearchProblem(costs.tables(new_batch())), repeats)
    decision = timed(lambda: planner.decide([new_batch()], running), repeats)
    bounded = timed(lambda: hbsa.layers.search(batches[next_batch()], stages, True), repeats)
    free = timed(lambda: hbsa.layers.search(batches[next_batch()], stages, False), repeats)
    return {
        "devices": PAPER_DEVICES[name],
        "units": costs.num_elements,
        "micro_batches": statistics.median(len(b.tokens) for b in batches),
        "search": search.median,
        "tables": tables.median,
        "decision": decision.median,
        "hbsa": bounded.median,
        "hbsa_unbounded": free.median,
    }


def large(devices: int, config: ModelConfig, granule: int, repeats: int) -> dict[str, float]:
    """The search on many servers of eight, with groups of whole servers (or any: ``granule`` 1).

    The decision is for a start: without a current plan and without simulations.
    """
    servers = max(1, devices // 8)
    cluster = replace(load("h200"), servers=servers, devices_per_server=min(8, devices))
    planner = planner_for(
        config, cluster, simulations=0, server_groups_above=devices if granule == 1 else 0
    )
    costs = planner.units
    # So many micro-batches that work, not the slowest one alone, sets the time.
    r = np.random.default_rng(1)
    tokens = np.rint(4096 * np.exp(0.3 * r.standard_normal(4 * devices)))
    batch = Batch(tokens, tokens * 1000.0)
    granule = min(granule, devices)
    problem = SearchProblem(costs.tables(batch, granule=granule), granule=granule)
    found = problem.search()
    assert found is not None
    tables = timed(lambda: costs.tables(replace(batch), granule=granule), repeats)
    decision = timed(lambda: planner.decide([replace(batch)], None), repeats)
    return {
        "devices": devices,
        "units": costs.num_elements,
        "micro_batches": len(batch.tokens),
        "search": timed(problem.search, repeats).median,
        "tables": tables.median,
        "decision": decision.median,
        "seconds": found.seconds,
    }


def growth(repeats: int) -> dict[str, list[dict[str, float]]]:
    """The search against devices (258 units, whole servers) and against units (256 devices)."""
    wide = model("gpt-3.35b")
    base = replace(wide, num_layers=128)
    by_devices = [large(d, base, 8, repeats) for d in (64, 128, 256, 512, 1024, 2048)]
    by_units = [
        large(256, replace(base, num_layers=n), 8, repeats) for n in (8, 16, 32, 64, 128, 256, 512)
    ]
    return {"devices": by_devices, "units": by_units}


def plot(data: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Two curves: milliseconds against devices and against units."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, (name, rows) in zip(axes, data.items(), strict=True):
        axis.loglog([r[name] for r in rows], [r["search"] for r in rows], "o-", label="search")
        axis.loglog([r[name] for r in rows], [r["tables"] for r in rows], "s--", label="tables")
        axis.set_xlabel(name)
        axis.set_ylabel("milliseconds")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path)


def show_speed(rows: dict[str, dict[str, float]]) -> None:
    """The table of the docs."""
    print("| model | devices | units | micro-batches | exact search | tables | whole decision |"
          " HBSA | without bounds | paper's HBSA, without bounds |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, r in rows.items():
        with_bounds, without = PAPER_MS[name]
        print(
            f"| {name} | {r['devices']} | {r['units']} | {r['micro_batches']:.0f} |"
            f" {r['search']:.2f} ms | {r['tables']:.2f} ms | {r['decision']:.1f} ms |"
            f" {r['hbsa']:.2f} ms | {r['hbsa_unbounded']:.1f} ms | {with_bounds}, {without} ms |"
        )


def show_large(rows: Sequence[dict[str, float]]) -> None:
    """Large jobs."""
    print("| devices | units | micro-batches | search | tables | whole decision |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['devices']} | {r['units']} | {r['micro_batches']} | {r['search']:.1f} ms |"
            f" {r['tables']:.1f} ms | {r['decision']:.1f} ms |"
        )


def actions(count: int, samples: int, who: str, budgets: Sequence[int]) -> Counter[Action]:
    """What a planner does over ``count`` batches, each decision from the plan before it."""
    config, cluster = model("gpt-3.35b"), load("a100x16")
    found: Counter[Action] = Counter()
    running: Running | None = None

    def ways(number: int) -> list[Batch]:
        return [drawn(config, 10_000 * samples + number, samples, b) for b in budgets]

    finders: dict[int, Finder] = {}
    if who == "lookahead":
        planner = planner_for(config, cluster, simulations=0)
        static = planner.best_static([ways(k) for k in range(32)])
        own = Lookahead(planner, static, Hbsa(planner_for(config, cluster, planner="hbsa")))
        finders = {k: planner.finder(ways(k)) for k in range(WINDOW - 1)}
    else:
        # As the paper: its time model and its measured totals, where the longest sample decides.
        planner = planner_for(
            config, cluster, planner="hbsa", unit="layer", time_model="paper", simulations=0
        )
        fit = PeakFit(143e9, 0.083e9) if who == "hbsa, paper's M_peak" else None
        hbsa = Hbsa(planner, fit, 80e9 if fit else None)
    for number in tqdm(range(count), desc=f"{who}, {samples} samples", unit="batch"):
        if who == "lookahead":
            finders[number + WINDOW - 1] = planner.finder(ways(number + WINDOW - 1))
            window = [finders[k] for k in range(number, number + WINDOW)]
            decision, _ = own.decide_among(window, running, Pool.empty())
            batch = finders.pop(number).pricers[decision.micro_batching].batch
        else:
            lengths = mixture_lengths(10_000 * samples + number, np.arange(samples))
            batch = ways(number)[0]
            decision = hbsa.decide(batch, running, float(lengths.max()))
        if running is not None:
            found[decision.action] += 1
        if who == "hbsa, paper's M_peak":
            free = max(0.0, 80e9 - fit(float(batch.tokens.max())) / len(decision.plan.stages))  # type: ignore[misc]
            running = Running(decision.plan, decision.predicted.seconds, (free,) * 16)
        else:
            running = planner.running(decision.plan, batch)
    return found


def show_actions(count: int) -> None:
    """Both planners on both batch sizes."""
    print("| planner | samples | " + " | ".join(f"{a.symbol} {a.name.lower()}" for a in Action)
          + " | a switch every | memory optimisation every |")  # fmt: skip
    print("|---|---|" + "---|" * len(Action) + "---|---|")
    for who in ("hbsa, paper's M_peak", "hbsa", "lookahead"):
        for samples in (16, 32):
            found = actions(count, samples, who, (2048,) if who != "lookahead" else (1024, 2048))
            total = sum(found.values())
            switches = found[Action.GROW] + found[Action.SHRINK] + found[Action.MIGRATE]
            every = [
                f"{total / n:.0f}" if n else "never" for n in (switches, found[Action.OPTIMISE])
            ]
            shares = " | ".join(f"{found[a] / total:.1%}" for a in Action)
            print(f"| {who} | {samples} | {shares} | {every[0]} | {every[1]} |")
    print("| the paper | | | | | | | 37 | 4 |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=15, help="runs of each timing")
    parser.add_argument("--samples", type=int, default=64, help="samples of a batch")
    parser.add_argument("--micro-batch-tokens", type=int, default=1024, help="token budget")
    parser.add_argument("--actions", type=int, help="instead: count actions over so many batches")
    parser.add_argument("--plot", type=Path, help="write the growth curves to this SVG file")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.actions:
        show_actions(args.actions)
        return
    rows = {n: speed_of(n, args.repeats, args.samples, args.micro_batch_tokens) for n in PAPER_MS}
    show_speed(rows)
    print("\n258 blocks on 1,024 devices, groups of whole servers, then of any size:")
    few = max(3, args.repeats // 5)
    both = [large(1024, model("gpt-128"), g, few) for g in (8, 1)]
    show_large(both)
    print(f"server-sized groups cost {both[0]['seconds'] / both[1]['seconds'] - 1:.1%} of the time")
    print("\ngrowth (against devices, then against units):")
    curves = growth(few)
    for part in curves.values():
        show_large(part)
    if args.plot:
        plot(curves, args.plot)
    if args.json:
        args.json.write_text(json.dumps({"speed": rows, "large": both, "growth": curves}) + "\n")


if __name__ == "__main__":
    main()
