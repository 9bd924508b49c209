#!/usr/bin/env python3
"""What a plan takes on every device, before any device is booked.

    python tools/report_memory.py --model gpt-3.35b --plan "0:12@0 | 12:23@1 | 23:34@2,3" \\
        --lengths 2560 300 120 90 --micro-batch-tokens 1024
    python tools/report_memory.py --model gpt-13b --stages 8 --devices 8 --mock-samples 32 --compare

    python tools/report_memory.py --workers 4 FLAGS-OF-A-TRAINING-COMMAND
    python tools/report_memory.py --workers 4 --load CHECKPOINTS --use-checkpoint-args

The last two report on the batch that has the longest sample among the first ``--batches`` of the
run, under the plan of the flags; with --flexpipe under the one that the planner chooses for it.

``--plan`` is a plan's text form, with what it does for its memory: ``; recompute 1-4 ; optimizer
5,6 ; activations 8``. ``--stages`` cuts an even layout by cost instead. The peak is found by going
through the very instruction lists that workers would run. ``--budget-gb`` says which devices are
over it; ``--compare`` adds the same layout without memory optimisation and with all of each kind.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.data.errors import DataError
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.data.microbatches import cut_by_tokens
from megatron_flex.data.mock import mixture_lengths
from megatron_flex.loop.iteration import tensor_of
from megatron_flex.loop.questions import ABOUT, Run, heaviest, read_run
from megatron_flex.loop.setup import planner_setup
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.model.tensor_cut import check
from megatron_flex.planner.flops import cost_coefficients
from megatron_flex.planner.footprint import Footprint
from megatron_flex.planner.memory import total_parameters
from megatron_flex.planner.passes import passes
from megatron_flex.planner.plan import OPlan, Plan, PlanError
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.presets import MODELS, model
from megatron_flex.planner.service import Service
from megatron_flex.planner.static import static_plan
from megatron_flex.planner.tensor import TensorParallel
from megatron_flex.planner.ways import ways
from megatron_flex.programs import build_program
from megatron_flex.quantities import memory_budget
from megatron_flex.signals import run_tool
from megatron_flex.tokenizers.base import TokenizerError


@dataclass(frozen=True)
class Row:
    """One device under one plan, in bytes; ``updates`` is the peak after the global norm."""

    device: int
    units: str
    slabs: float
    peak: float
    updates: float

    @property
    def most(self) -> float:
        """Peak of the whole iteration."""
        return max(self.peak, self.updates)


def parser(beside_a_run: bool = False) -> argparse.ArgumentParser:
    """All flags, or those that go with a training command's."""
    p = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0].removeprefix("#!/usr/bin/env python3\n"),
        epilog=ABOUT,
        allow_abbrev=False,
    )
    if not beside_a_run:
        _without_a_run(p)
    else:
        p.add_argument("--batches", type=int, default=100, help="first batches to look through")
        p.add_argument("--plan", help="another plan than that of the flags, in text form")
    p.add_argument("--budget-gb", type=float, help="of a device, in 10^9 bytes")
    p.add_argument("--compare", action="store_true", help="other memory optimisations beside it")
    p.add_argument("--json", action="store_true", help="one JSON object a plan, nothing else")
    return p


def _without_a_run(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default="gpt-3.35b", help=f"one of {', '.join(MODELS)}")
    p.add_argument("--float32", action="store_true", help="the model in float32, not bfloat16")
    plan = p.add_mutually_exclusive_group(required=True)
    plan.add_argument("--plan", help="a plan in text form")
    plan.add_argument("--stages", type=int, help="an even layout of so many stages, cut by cost")
    p.add_argument("--devices", type=int, help="devices; default: those of the plan, or the stages")
    batch = p.add_mutually_exclusive_group(required=True)
    batch.add_argument("--lengths", type=int, nargs="+", help="tokens of the batch's samples")
    batch.add_argument("--mock-samples", type=int, help="draw so many from FLANv2's lengths")
    p.add_argument("--seed", type=int, default=1234, help="of drawn lengths")
    p.add_argument("--micro-batch-tokens", type=int, default=1024, help="as in training")
    p.add_argument("--schedule", choices=["1f1b", "gpipe"], default="1f1b", help="as in training")
    p.add_argument("--bitwise", action="store_true", help="with --flexpipe-bitwise")
    p.add_argument(
        "--tensor-model-parallel-size",
        type=int,
        default=1,
        help="GPUs that share each layer and are one device; bytes are of each",
    )
    p.add_argument("--sequence-parallel", action="store_true",
                   help="they share what lies between the products, too")  # fmt: skip


def micro_batches(args: argparse.Namespace, config: ModelConfig) -> tuple[MicroBatch, ...]:
    """The batch, cut as the trainer cuts it."""
    if args.lengths:
        lengths = np.asarray(args.lengths, dtype=np.int64)
    else:
        lengths = mixture_lengths(args.seed, np.arange(args.mock_samples))
    if not len(lengths) or lengths.min() < 1:
        raise ValueError("a batch needs samples of at least one token")
    batch = GlobalBatch(0, lengths, (int(lengths.sum()),))
    return cut_by_tokens(batch, args.micro_batch_tokens, cost_coefficients(config))


def plans(args: argparse.Namespace, config: ModelConfig) -> tuple[int, dict[str, Plan]]:
    """The number of devices, and the plans to report by name."""
    for name in ("stages", "devices"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1")
    if args.plan is not None:
        plan = Plan.parse(args.plan)
        devices = args.devices or plan.devices[-1] + 1
    else:
        devices = args.devices or args.stages
        if devices % args.stages:
            raise ValueError(f"{devices} devices are no multiple of --stages {args.stages}")
        plan = static_plan(config, args.stages, devices)
    plan.check(config.layers.num_units, devices)
    return devices, beside(config, plan, compare=args.compare)


def beside(config: ModelConfig, plan: Plan, *, compare: bool) -> dict[str, Plan]:
    """A plan, and the same layout with other memory optimisations, by name."""
    found = {"as given" if plan.o_plan else "none": plan}
    if compare:
        halves = tuple(u.index for u in config.layers.units if u.layer is not None)
        attention = tuple(u.index for u in config.layers.units if u.kind is Kind.ATTENTION)
        every = tuple(range(config.layers.num_units))
        for name, o_plan in {
            "none": OPlan(),
            "recompute attention": OPlan(recompute=attention),
            "recompute all": OPlan(recompute=halves),
            "optimizer on the host": OPlan(optimizer=every),
            "optimizer sharded": OPlan(),
            "activations on the host": OPlan(activations=halves),
            "recompute all, optimizer on the host": OPlan(recompute=halves, optimizer=every),
            "recompute all, optimizer sharded": OPlan(recompute=halves),
        }.items():
            other = replace(plan, o_plan=o_plan)
            if name.endswith("sharded"):
                other = other.sharded()
                if not other.o_plan.shard:
                    continue  # no stage has replicas
            found.setdefault(name, other)
    return found


def plan_for(run: Run, lengths: Sequence[int]) -> Plan:
    """The plan of the flags, or with --flexpipe the one that is chosen for samples so long."""
    if not run.config.flexpipe.flexpipe:
        return run.parts.plan
    setup = planner_setup(run.config, run.parts, run.config.devices, run.coefficients)
    among = ways(setup.cut, lengths, run.config.devices)
    return Service(setup).planner.decide_with(Pool.empty(), among, None)[0].plan


def report(
    config: ModelConfig,
    plan: Plan,
    devices: int,
    parts: Sequence[MicroBatch],
    *,
    bitwise: bool,
    schedule: str,
    tensor: TensorParallel,
) -> list[Row]:
    """The devices that hold a stage."""
    footprint = Footprint(config, exact=bitwise, tensor=tensor)
    program = build_program(config, plan, parts, devices, policy=schedule, tensor=tensor)
    sliced = [p.sliced for p in parts]
    rows = []
    for device in plan.devices:
        stages = [plan.stages[n] for n in plan.stages_of(device)]
        peak, updates = footprint.device(program, device, sliced)
        units = ", ".join(f"{s.start}-{s.stop - 1}" for s in stages)
        rows.append(Row(device, units, footprint.held(plan, device), peak, updates))
    return rows


def table_of_units(config: ModelConfig, tensor: TensorParallel) -> list[str]:
    """What one unit of each kind takes."""
    footprint = Footprint(config, tensor=tensor)
    lines = [
        f"{'unit':12}{'state (MB)':>12}{'optimizer (MB)':>16}{'kept (kB/token)':>17}"
        f"{'recomputed':>12}{'backward':>10}"
    ]
    for unit in config.layers.units[:3] + config.layers.units[-1:]:
        p = passes(config, tensor)[unit.kind]
        state = footprint.slab(unit.index)
        optimizer = state - footprint.slab(unit.index, offloaded=True)
        boundary = 0.0 if unit.kind is Kind.EMBEDDING else footprint.boundary
        lines.append(
            f"{unit.kind.value:12}{state / 1e6:12.1f}{optimizer / 1e6:16.1f}"
            f"{(p.kept + boundary) / 1e3:17.2f}{boundary / 1e3:12.2f}"
            f"{max(x.token for x in p.backward) / 1e3:10.2f}"
        )
    if config.layers.tied_slab is not None:
        state = footprint.slab(config.layers.tied_slab)
        optimizer = state - footprint.slab(config.layers.tied_slab, offloaded=True)
        lines.append(f"{'tied words':12}{state / 1e6:12.1f}{optimizer / 1e6:16.1f}")
    return lines


def table_of_devices(rows: Sequence[Row], budget: float | None) -> list[str]:
    """The devices of one plan."""
    lines = [
        f"{'device':>8}  {'units':20}{'slabs (GB)':>12}{'activations':>13}{'updates':>10}"
        f"{'peak (GB)':>11}"
    ]
    for row in rows:
        over = ""
        if budget is not None and row.most > budget:
            over = f"  {(row.most - budget) / 1e9:.3f} GB over the budget"
        lines.append(
            f"{row.device:8d}  {row.units:20}{row.slabs / 1e9:12.3f}"
            f"{(row.peak - row.slabs) / 1e9:13.3f}{(row.updates - row.slabs) / 1e9:10.3f}"
            f"{row.most / 1e9:11.3f}{over}"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args, run = read_run(parser, argv)
        given = memory_budget(args.budget_gb, "--budget-gb")
        if run is None:
            name, config = args.model, model(args.model)
            if args.float32:
                config = replace(config, params_dtype="float32")
            parts = micro_batches(args, config)
            devices, listed = plans(args, config)
            bitwise, schedule = args.bitwise, args.schedule
            tensor = TensorParallel(args.tensor_model_parallel_size, args.sequence_parallel)
            check(config, tensor.size, vocabulary=False)
        else:
            name, config, devices = "this run", run.parts.model, run.config.devices
            tensor = tensor_of(run.config)
            lengths = heaviest(run.lengths(max(1, args.batches)))
            plan = Plan.parse(args.plan) if args.plan else plan_for(run, lengths)
            plan.check(config.layers.num_units, devices)
            parts = run.micro_batches(lengths, plan)
            listed = beside(config, plan, compare=args.compare)
            bitwise = run.config.flexpipe.flexpipe_bitwise
            schedule = run.config.flexpipe.flexpipe_schedule or "1f1b"
        found = {
            key: report(
                config, p, devices, parts, bitwise=bitwise, schedule=schedule, tensor=tensor
            )
            for key, p in listed.items()
        }
    except (DataError, PlanError, TokenizerError, ValueError, OSError) as error:
        print(f"report_memory: {error}", file=sys.stderr)
        return 1
    budget = given
    if budget is None and run is not None:
        budget = run.config.flexpipe.memory_budget
    tokens = [m.tokens for m in parts]
    if args.json:
        for key, rows in found.items():
            each = [vars(row) | {"most": row.most} for row in rows]
            head = {"name": key, "plan": str(listed[key]), "micro_batches": tokens}
            print(json.dumps({**head, "devices": each}))
        return 0
    if run is not None:
        print("\n".join(line.removeprefix(" ") for line in run.lines()))
    print(f"{name}: {total_parameters(config):,} parameters in {config.params_dtype};"
          f" {len(parts)} micro-batches of {min(tokens)} to {max(tokens)} tokens")  # fmt: skip
    if tensor.size > 1:
        print(f"{tensor}: a device is {tensor.size} GPUs, and bytes are those of each")
    print("\n".join(table_of_units(config, tensor)))
    for key, rows in found.items():
        print(f"\n{key}: {listed[key]}")
        print("\n".join(table_of_devices(rows, budget)))
    return 0


if __name__ == "__main__":
    run_tool(main)
