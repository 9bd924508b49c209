#!/usr/bin/env python3
"""Plan iterations without a GPU: what the trainer would decide, and why.

    python tools/plan.py --model gpt-3.35b --cluster a100x16 --lengths 2560 300 120 90
    python tools/plan.py --model gpt-3.35b --cluster a100x16 --batch-file batches.txt --json

    python tools/plan.py --workers 4 FLAGS-OF-A-TRAINING-COMMAND
    python tools/plan.py --workers 4 --load CHECKPOINTS --use-checkpoint-args

The last two plan the first batches of a run (``--batches``), as its flags or its checkpoint have
it, and say what they would take on the plan of the flags.

``--batch-file`` has one global batch a line: the lengths of its samples in tokens, separated by
spaces (blank lines and lines that begin with # are skipped). Its batches are planned one after the
other, each decision from the plan before it. ``--mock-batches N`` draws N batches from the
published FLANv2 length statistics instead. Each batch may be cut into micro-batches in several
ways, of which the best is taken: as in training, long samples of a GPT are cut to slices, and the
sizes follow from the batch unless ``--micro-batch-tokens`` names some.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.cluster.cluster import ClusterError, load
from megatron_flex.cluster.profile import Profile, ProfileError
from megatron_flex.data.bar import SHORT, progress_bar, shown
from megatron_flex.data.cut import Cut
from megatron_flex.data.errors import DataError
from megatron_flex.data.mock import mixture_lengths
from megatron_flex.loop.questions import ABOUT, Run, read_run
from megatron_flex.loop.setup import planner_setup
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.tensor_cut import check
from megatron_flex.planner.budget import SECONDS, budget_advice, smallest_budget
from megatron_flex.planner.build import Batch
from megatron_flex.planner.closed_form import run_profile
from megatron_flex.planner.decision import Decision, Infeasible
from megatron_flex.planner.explain import explain
from megatron_flex.planner.flops import cost_coefficients
from megatron_flex.planner.hbsa import Hbsa
from megatron_flex.planner.lookahead import Lookahead
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.presets import MODELS, model
from megatron_flex.planner.service import Service
from megatron_flex.planner.switching import Running
from megatron_flex.planner.tensor_choice import Outlook, best, in_words, reasons, sizes
from megatron_flex.planner.ways import ways
from megatron_flex.quantities import memory_budget
from megatron_flex.schedule.list_scheduler import POLICIES
from megatron_flex.signals import run_tool
from megatron_flex.simulator.sources import read_batches
from megatron_flex.tokenizers.base import TokenizerError

BUDGETS = (1024, 2048, 4096)
"""Tokens of a micro-batch of whole samples to choose among."""


def parser(beside_a_run: bool = False) -> argparse.ArgumentParser:
    """All flags, or those that go with a training command's."""
    p = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0].removeprefix("#!/usr/bin/env python3\n"),
        epilog=ABOUT,
        allow_abbrev=False,
    )
    if beside_a_run:
        p.add_argument("--batches", type=int, default=4, help="first batches of the run to plan")
        p.add_argument("--current", help="the plan that runs before the first, in text form")
        p.add_argument("--json", action="store_true", help="one JSON object a decision")
        return p
    p.add_argument("--model", default="gpt-3.35b", help=f"one of {', '.join(MODELS)}")
    p.add_argument(
        "--cluster", default="a100x16",
        help="a described cluster (a100, h200, cpu, with xN for N devices), or a file",
    )  # fmt: skip
    p.add_argument("--profile", type=Path, help="a profile measured by tools/profile_layers.py")
    p.add_argument(
        "--tensor-model-parallel-size", type=tensor_size, default=1, metavar="{N,auto}",
        help="devices of a server that share each layer, and are one device of a plan; auto: as"
        " many as are predicted to be fastest",
    )  # fmt: skip
    p.add_argument("--sequence-parallel", action="store_true",
                   help="they share what lies between the products, too")  # fmt: skip
    batches = p.add_mutually_exclusive_group(required=True)
    batches.add_argument("--lengths", type=int, nargs="+", help="tokens of the batch's samples")
    batches.add_argument("--batch-file", type=Path, help="one batch a line, lengths in tokens")
    batches.add_argument("--mock-batches", type=int, help="draw so many batches")
    p.add_argument("--global-batch-size", type=int, default=32, help="samples of a drawn batch")
    p.add_argument("--seed", type=int, default=1234, help="of drawn batches")
    p.add_argument(
        "--micro-batch-tokens", type=int, nargs="+",
        help="sizes of a micro-batch to choose among; default: what suits the batch, and for whole"
        f" samples {', '.join(map(str, BUDGETS))}",
    )  # fmt: skip
    p.add_argument(
        "--slice-tokens", default="auto", metavar="{auto,0,N}",
        help="as --flexpipe-slice-tokens: long samples in slices of equal cost, whole, or of N",
    )  # fmt: skip
    p.add_argument("--current", help="the plan that runs before the first batch, in text form")
    p.add_argument(
        "--planner", choices=["lookahead", "hbsa", "greedy", "static"], default="lookahead",
        help="greedy is the exact search for each batch by itself",
    )  # fmt: skip
    p.add_argument("--unit", choices=["block", "layer"], default="block", help="what is placed")
    p.add_argument(
        "--schedule", choices=[*POLICIES], default="1f1b",
        help="schedule that executes the plan",
    )  # fmt: skip
    p.add_argument("--time-model", choices=["pipeline", "paper"], default="pipeline",
                   help="paper: eq. 1, for --planner hbsa")  # fmt: skip
    p.add_argument("--memory-budget-gb", type=float, help="of a device; default: the cluster's")
    p.add_argument("--lookahead", type=int, default=4, help="batches planned together")
    p.add_argument("--margin", type=float, default=0.02, help="what a switch must save, as a part")
    p.add_argument("--simulations", type=int, default=50, help="plans simulated; 0: none")
    p.add_argument("--shard-optimizer", action="store_true", help="optimizer state over replicas")
    p.add_argument("--no-memory-optimisation", action="store_true", help="ablation: no O_plan")
    p.add_argument("--no-bounds", action="store_true", help="ablation: HBSA without its bounds")
    p.add_argument("--no-lookahead", action="store_true", help="ablation: each batch by itself")
    p.add_argument("--json", action="store_true", help="one JSON object a decision, nothing else")
    return p


def tensor_size(text: str) -> int:
    """A flag's value; 0: to be chosen."""
    if text == "auto":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number above 0 nor auto")
    return int(text)


def batches_of(args: argparse.Namespace) -> list[Sequence[int]]:
    """Lengths of the samples of every batch."""
    if args.batch_file is not None:
        return list(read_batches(args.batch_file))
    if args.lengths is not None:
        if min(args.lengths) < 1:
            raise ValueError(f"--lengths must be at least 1, not {min(args.lengths)}")
        return [args.lengths]
    for name in ("mock_batches", "global_batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    number, size = args.mock_batches, args.global_batch_size
    drawn = mixture_lengths(args.seed, np.arange(number * size))
    return list(drawn.reshape(number, size).tolist())


def cuts(args: argparse.Namespace, config: ModelConfig) -> list[Cut]:
    """The ways of cutting batches."""
    cost = cost_coefficients(config)
    given, sliced = args.slice_tokens, config.architecture == "gpt"
    if given == "auto":
        sizes = args.micro_batch_tokens or (None,)
        return [Cut(size, by_cost=True, sliced=sliced, cost=cost) for size in sizes]
    if not given.isdecimal() or (given != "0" and not sliced):
        raise ValueError(
            f"--slice-tokens {given}: expected auto, 0 for never, or (of a GPT) a number of tokens"
        )
    sizes = args.micro_batch_tokens or BUDGETS
    return [Cut(size, slice_tokens=int(given), cost=cost) for size in sizes]


def cut_batch(lengths: Sequence[int], among: Sequence[Cut], devices: int) -> list[Batch]:
    """The ways of cutting one batch, each once."""
    found = (batch for cut in among for batch in ways(cut, lengths, devices))
    return list({batch.key: batch for batch in found}.values())


def options(args: argparse.Namespace) -> PlannerOptions:
    """The planner's options from flags."""
    return PlannerOptions(
        planner="lookahead" if args.planner == "greedy" else args.planner,
        unit=args.unit,
        schedule=args.schedule,
        time_model=args.time_model,
        memory_optimisation=not args.no_memory_optimisation,
        bounds=not args.no_bounds,
        lookahead=1 if args.no_lookahead or args.planner == "greedy" else args.lookahead,
        margin=args.margin,
        shard_optimizer=args.shard_optimizer,
        budget=memory_budget(args.memory_budget_gb, "--memory-budget-gb"),
        simulations=args.simulations,
        tensor_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
    )


def described(args: argparse.Namespace, config: ModelConfig) -> tuple[Planner, list[list[Batch]]]:
    """The planner for a described cluster, and the batches as they may be cut."""
    chosen = options(args)
    check(config, chosen.tensor_size, vocabulary=False)
    cluster = load(args.cluster).grouped(chosen.tensor_size)
    given = Profile.load(args.profile) if args.profile else None
    profile = run_profile(config, cluster, chosen.tensor, given)
    if (doubt := profile.doubt(None)) is not None:
        print(f"plan: warning: {doubt}", file=sys.stderr)
    planner, among = Planner(config, profile, cluster, chosen), cuts(args, config)
    return planner, [cut_batch(b, among, cluster.world_size) for b in batches_of(args)]


def choose_tensor_size(args: argparse.Namespace, config: ModelConfig) -> None:
    """Set the tensor-parallel size to the one that is predicted to be fastest, and say why."""
    if args.current is not None:
        raise ValueError("--current is a plan for one --tensor-model-parallel-size: give that")
    cluster = load(args.cluster)
    sequence = args.sequence_parallel
    outlooks = []
    for size in sizes(cluster.world_size, cluster.devices_per_server):
        args.tensor_model_parallel_size, args.sequence_parallel = size, sequence and size > 1
        outlooks.append(outlook(args, config, size))
    chosen = best(outlooks)
    args.tensor_model_parallel_size = chosen.size
    args.sequence_parallel = sequence and chosen.size > 1
    print("\n".join(reasons(outlooks, chosen)), file=sys.stderr)


def outlook(args: argparse.Namespace, config: ModelConfig, size: int) -> Outlook:
    """What is predicted with ``size`` devices that share each layer."""
    try:
        found = [d for d, _ in decisions(*described(args, config), None)]
    except (Infeasible, PlanError, ValueError) as error:
        return Outlook(size, problem=str(error))
    seconds = sum(d.predicted.seconds for d in found) / len(found)
    peak = max(max(d.predicted.device_bytes) for d in found)
    return Outlook(size, seconds, in_words(found[0].plan), peak)


def decisions(
    planner: Planner,
    batches: Sequence[Sequence[Batch]],
    current: Plan | None,
    static: Plan | None = None,
) -> list[tuple[Decision, float]]:
    """A decision for every batch and the seconds that it took.

    ``static``: the plan that is always among the candidates; default: the best single one.
    """
    chosen = planner.options
    if static is None and (chosen.planner == "static" or chosen.lookahead > 1):
        static = planner.best_static(batches)
    hbsa = Hbsa(planner)
    lookahead = None if static is None else Lookahead(planner, static, hbsa)
    running: Running | None = None
    if current is not None:
        running = planner.running(current, batches[0][0])
    found = []
    pool = Pool.empty()
    for number, batch in enumerate(shown(batches, "plan", unit=" batches")):
        start = time.perf_counter()
        if chosen.planner == "hbsa":
            decision = hbsa.decide(batch[0], running)
        elif chosen.planner == "static":
            assert static is not None
            finder = planner.finder(batch)
            candidate = finder.best_of(static, running)
            decision = planner.choose(finder, [candidate], running)
        elif lookahead is not None:
            window = batches[number : number + chosen.lookahead]
            decision, pool = lookahead.decide_with(pool, window, running)
        else:
            decision, pool = planner.decide_with(pool, batch, running)
        found.append((decision, time.perf_counter() - start))
        running = planner.running(decision.plan, batch[decision.micro_batching])
    return found


def smallest(
    planner: Planner,
    batches: Sequence[Sequence[Batch]],
    current: Plan | None,
    error: Exception,
    static: Plan | None = None,
    flag: str = "--memory-budget-gb",
) -> str:
    """What to say of the smallest budget with which all batches fit, given by ``flag``."""
    units = planner.units

    began = time.process_time()

    def fits(budget: int) -> bool:
        chosen = replace(planner.options, budget=budget, simulations=0)
        bar.update(min(SECONDS, time.process_time() - began) - bar.n)
        try:
            other = Planner(units.config, units.profile, units.cluster, chosen)
            decisions(other, batches, current, static)
        except (Infeasible, PlanError):
            return False
        return True

    with progress_bar(SECONDS, "try budgets", unit=" s", delay=SHORT) as bar:
        size = smallest_budget(fits, units.budget, getattr(error, "shortfall", 0.0))
    if size is None:
        return ""
    reserved = units.cluster.reserved if planner.options.budget is None else 0
    return budget_advice(size, flag, reserved)


def of_a_run(run: Run, number: int) -> tuple[Planner, list[list[Batch]]]:
    """The planner of a training command with --flexpipe, and the first batches."""
    if number < 1:
        raise ValueError("--batches must be at least 1")
    size = run.config.devices
    setup = planner_setup(run.config, run.parts, size, run.coefficients)
    cut = setup.cut
    return Service(setup).planner, [list(ways(cut, n, size)) for n in run.lengths(number)]


def compared(
    planner: Planner, batches: Sequence[Sequence[Batch]], static: Plan, found: Sequence[Decision]
) -> list[str]:
    """The mean time of the plans found beside that of one plan."""
    chosen = sum(d.predicted.total for d in found) / len(found)
    times = []
    for number, batch in enumerate(batches, 1):
        finder = planner.finder(batch)
        candidate = planner.fitted(finder, finder.best_of(static, None))
        if not candidate.price.fits:
            return [
                f"batch {number} of {len(batches)} does not fit the plan of the flags: {static}"
            ]
        times.append(planner.choose(finder, [candidate], None).predicted.seconds)
    mean = sum(times) / len(times)
    return [
        f"over {len(batches)} batches, by the cost model: {chosen:.4f} s an iteration with"
        f" --flexpipe, {mean:.4f} s on the plan of the flags ({mean / chosen:.2f} times as long):"
        f" {static}"
    ]


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args, run = read_run(parser, argv)
        if run is not None:
            return answer(args, run)
    except (DataError, PlanError, TokenizerError, ValueError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 1
    try:
        config = model(args.model)
        if args.tensor_model_parallel_size == 0:
            choose_tensor_size(args, config)
        planner, batches = described(args, config)
        current = Plan.parse(args.current) if args.current else None
        if current is not None:
            current.check(config.layers.num_units, planner.units.num_devices)
        try:
            found = decisions(planner, batches, current)
        except (Infeasible, PlanError) as error:
            raise ValueError(f"{error}{smallest(planner, batches, current, error)}") from error
    except (ClusterError, ProfileError, DataError, PlanError, ValueError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 1
    show(args.json, config, batches, found)
    return 0


def answer(args: argparse.Namespace, run: Run) -> int:
    """For the flags of a training command."""
    planner, batches = of_a_run(run, args.batches)
    current = Plan.parse(args.current) if args.current else None
    if current is not None:
        current.check(run.parts.model.layers.num_units, run.config.devices)
    try:
        found = decisions(planner, batches, current, run.parts.plan)
    except (Infeasible, PlanError) as error:
        flag = "--flexpipe-memory-budget-gb"
        advice = smallest(planner, batches, current, error, run.parts.plan, flag)
        raise ValueError(f"{error}{advice}") from error
    if not args.json:
        print("\n".join(line.removeprefix(" ") for line in run.lines()), "\n")
    show(args.json, run.parts.model, batches, found)
    if not args.json:
        print("\n".join(compared(planner, batches, run.parts.plan, [d for d, _ in found])))
    return 0


def show(
    as_json: bool,
    config: ModelConfig,
    batches: Sequence[Sequence[Batch]],
    found: Sequence[tuple[Decision, float]],
) -> None:
    """Print decisions."""
    for number, (decision, seconds) in enumerate(found):
        if as_json:
            data = {"batch": number, "planner_seconds": seconds, **json.loads(decision.to_json())}
            print(json.dumps(data))
        else:
            if len(found) > 1:
                print(f"--- batch {number} ---")
            print(explain(decision, config.layers))
            batch = batches[number][decision.micro_batching]
            slices = sum(map(len, batch.chains))
            sliced = f"; {len(batch.chains)} samples in {slices} slices" if slices else ""
            count, most = len(batch.tokens), batch.tokens.max()
            print(f"micro-batches: {count} of up to {most:.0f} tokens{sliced}")
            print(f"decided in {seconds * 1e3:.1f} ms\n")


if __name__ == "__main__":
    run_tool(main)
