#!/usr/bin/env python3
"""Draw pipeline schedules in the terminal or to a picture.

    python tools/draw_schedule.py --devices 4 --micro-batches 8
    python tools/draw_schedule.py --devices 4 --micro-batches 8 --schedule gpipe 1f1b zb-h1 zb-v
    python tools/draw_schedule.py --devices 4 --tokens 900,120,400,60,300 --schedule zb-v best
    python tools/draw_schedule.py --plan "0:2@0,1 | 2:5@2 | 5:8@3" --micro-batches 6
    python tools/draw_schedule.py --devices 8 --schedule zb-v --output zbv.svg
    python tools/draw_schedule.py --trace trace.json --iteration 12 --output actual.svg

Every operation takes one second for each unit of its stage: forward, input half and weight half of
the backward alike. With --tokens, micro-batches take time in proportion to their tokens; 900/3 is a
sample of 900 tokens in three slices, which follow one another and go back in reverse. ZB-V puts
two stages of half the size on each device. 'best' is the shortest that the search finds on the
layout of ZB-V.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.planner.plan import Plan, PlanError, Stage
from megatron_flex.schedule import draw
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.list_scheduler import POLICIES, policy, search, simulate
from megatron_flex.schedule.operations import Floats, Integers, OpKind
from megatron_flex.schedule.placement import Placement, Problem, positions
from megatron_flex.schedule.replay import replay_program
from megatron_flex.schedule.text import load
from megatron_flex.signals import run_tool

BEST = "best"
_TOKENS = re.compile(r"(-?[0-9]{1,9})(?:/(-?[0-9]{1,9}))?")  # of a sample, and its slices
#: Layouts with two stages on each device, in a V.
V_SHAPED = ("zb-v", BEST)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of the tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--devices", type=int, default=4, help="devices of an even pipeline")
    what.add_argument("--plan", help="all stages, such as '0:5@0,1 | 5:8@2'")
    what.add_argument("--program", type=Path, help="a saved program, whose order is drawn")
    what.add_argument("--trace", type=Path, help="a trace of a run: planned against actual")
    parser.add_argument("--iteration", type=int, help="of the trace; default its last")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--tokens", help="tokens of each micro-batch, such as 900,120,400,60")
    parser.add_argument(
        "--schedule", nargs="+", default=["1f1b"], choices=[*POLICIES, BEST], metavar="NAME",
        help=f"one or more of {', '.join(POLICIES)}, {BEST}",
    )  # fmt: skip
    parser.add_argument("--transfer", type=float, default=0.0, metavar="SECONDS",
                        help="time on the link of a mean micro-batch")  # fmt: skip
    parser.add_argument("--width", type=int, help="characters for the time axis")
    parser.add_argument("--output", type=Path, help="picture to write (.svg, .png or .pdf)")
    return parser.parse_args(given)


def even_plan(devices: int, v: bool) -> Plan:
    """One unit a stage, one or (in a V) two stages a device."""
    stages = 2 * devices if v else devices
    return Plan(tuple(Stage(i, i + 1, (min(i, 2 * devices - 1 - i),)) for i in range(stages)))


def make(args: argparse.Namespace, name: str) -> Placement:
    """The schedule that the arguments describe, under one policy."""
    program = load(args.program) if args.program else None
    unit = 1.0
    chains: list[tuple[int, ...]] = []
    if program is not None:
        plan = program.plan
    elif args.plan:
        plan = Plan.parse(args.plan)
    else:
        plan = even_plan(args.devices, name in V_SHAPED)
        unit = 0.5 if name in V_SHAPED else 1.0
    if program is not None:
        tokens = list(program.tokens)
    elif args.tokens:
        tokens, chains = read_tokens(args.tokens)
    else:
        tokens = [1] * args.micro_batches
    if not tokens or min(tokens) < 1:
        raise ValueError("there must be at least one micro-batch, and each needs a token")
    mean = sum(tokens) / len(tokens)
    sizes = [unit * (stage.stop - stage.start) for stage in plan.stages]
    # Activations are counted in mean micro-batches on a mean device.
    held = len(plan.devices) / max(plan.degrees) / sum(sizes)
    relative = [t / mean for t in tokens]
    costs = OpCosts.scaled(sizes, relative, transfer=args.transfer, activation=held)
    if program is not None:
        return replay_program(program, costs)
    if name == BEST:
        choice = search(plan, costs, chains=chains)
        assert choice is not None  # without a limit there is always one
        return choice.placement
    return simulate(plan, costs, policy(name), chains=chains)


def read_tokens(text: str) -> tuple[list[int], list[tuple[int, ...]]]:
    """Tokens of each micro-batch, and the chains among them."""
    tokens: list[int] = []
    chains: list[tuple[int, ...]] = []
    for word in text.split(","):
        match = _TOKENS.fullmatch(word.strip())
        if match is None:
            raise ValueError(
                f"--tokens: '{word}' is not a number of tokens, such as 900, or 900/3 for a sample"
                " in three slices"
            )
        whole, number = int(match[1]), int(match[2] or 1)
        if not 1 <= number <= whole:
            raise ValueError(
                f"'{word}': a sample has at least one slice, and each at least a token"
            )
        if number > 1:
            chains.append(tuple(range(len(tokens), len(tokens) + number)))
        edges = [whole * i // number for i in range(number + 1)]
        tokens += [b - a for a, b in pairwise(edges)]
    return tokens, chains


def planned_and_actual(path: Path, iteration: int | None) -> dict[str, Placement]:
    """An iteration of a trace, as the schedule planned it and as it went."""
    events = json.loads(path.read_text())["traceEvents"]
    notes = {e["args"]["iteration"]: e["args"] for e in events if e.get("name") == "iteration"}
    if not notes:
        raise ValueError("it has no iterations")
    iteration = max(notes) if iteration is None else iteration
    if iteration not in notes:
        raise ValueError(f"it has iterations {min(notes)} to {max(notes)}, not {iteration}")
    note = notes[iteration]
    plan, batches = Plan.parse(note["plan"]), len(note["tokens"])
    stages = len(plan.stages)
    spans = []
    for event in events:
        kind = _KINDS.get(event.get("name"))
        if kind is not None and event["args"]["iteration"] == iteration:
            words = dict(word.split("=") for word in event["args"]["what"].split())
            code = (kind * stages + int(words["stage"])) * batches + int(words["micro_batch"])
            began, stop = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            planned = event["args"].get("planned", (0.0, 0.0))
            spans.append((code, event["pid"], (began, stop), tuple(planned)))
    if not spans:
        raise ValueError(f"iteration {iteration} has no operations")
    spans.sort()
    kinds = len(spans) // (stages * batches)
    if [code for code, *_ in spans] != list(range(kinds * stages * batches)):
        raise ValueError(f"iteration {iteration} lacks operations")
    devices = np.array([device for _, device, *_ in spans])
    route = devices[: stages * batches].reshape(stages, batches)
    problem = Problem(
        plan,
        OpCosts.uniform(stages, batches, activation=0.0),
        tuple(map(tuple, route.tolist())),
        split=kinds == 3,
    )
    times = {
        "planned": np.array([planned for *_, planned in spans]),
        "actual": np.array([went for *_, went, _ in spans]),
    }
    return {name: _placement(problem, devices, found) for name, found in times.items()}


_KINDS = {
    "Forward": OpKind.FORWARD,
    "Backward": OpKind.BACKWARD,
    "BackwardInput": OpKind.BACKWARD,
    "BackwardWeight": OpKind.WEIGHT,
}


def _placement(problem: Problem, devices: Integers, times: Floats) -> Placement:
    """Operations as they ran; ``times``: start and stop of each, from any origin."""
    start, finish = (times - times[:, 0].min()).T
    sequence = np.lexsort((np.arange(len(start)), finish, start))
    orders = tuple(sequence[devices[sequence] == d] for d in range(problem.num_devices))
    peak = (0.0,) * problem.num_devices
    return Placement(problem, orders, start, finish, positions(sequence), float(finish.max()), peak)


def main(given: Sequence[str] | None = None) -> int:
    """Draw what the command line asks for; the exit status."""
    args = parse_arguments(given)
    if args.output and importlib.util.find_spec("matplotlib") is None:
        print("draw_schedule: --output needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    names = [str(args.program)] if args.program else args.schedule
    traced: dict[str, Placement] = {}
    if args.trace:
        try:
            traced = planned_and_actual(args.trace, args.iteration)
        except (OSError, ValueError, KeyError) as error:
            print(f"draw_schedule: {args.trace} cannot be drawn: {error}", file=sys.stderr)
            return 2
        names = list(traced)
    for number, name in enumerate(names):
        try:
            placement = traced[name] if args.trace else make(args, name)
        except (OSError, PlanError, ValueError) as error:
            print(f"draw_schedule: {error}", file=sys.stderr)
            return 2
        print(f"{'' if number == 0 else chr(10)}{name}")
        print(draw.grid(placement, args.width, "bytes" if args.trace else "micro-batches"))
        if args.output:
            path = args.output
            if len(names) > 1:
                path = path.with_name(f"{path.stem}-{name}{path.suffix}")
            draw.save(placement, path, name)
            print(f"picture: {path}")
    return 0


if __name__ == "__main__":
    run_tool(main)
