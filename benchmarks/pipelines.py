"""Ours against PyTorch's own ways on two real workers: real tokens a second of the same training.

    python benchmarks/pipelines.py                    about 10 minutes on two idle cores
    python benchmarks/pipelines.py --data runs/demo/data --lengths equal --cycles 15
    python benchmarks/pipelines.py --seq-length 8192 --lengths real --batches 6 --cycles 12

Two workers of one thread each train a GPT on the functions and classes of Python's standard
library, tokenized as examples/demo.sh does it. Ours are of three kinds, all chosen by simulation,
with costs that are measured first: whole samples packed, or long ones in slices, on the fastest
fixed plans; baselines (docs/simulator.md), each with the best layout and size of micro-batch for
the very batches; and `flexpipe`, whose planner decides for every batch and switches. PyTorch
trains a plain GPT with the same parameters and initial values: by torch.distributed.pipelining,
where all samples of a batch are padded to its longest, and by DistributedDataParallel on sorted,
padded micro-batches. Where its pipelines are cut is chosen by simulation too, its micro-batches by
trying some. In the second table all samples have the same length: nothing is padded.

Rows take turns, iteration by iteration, so that what else runs on the machine hits all alike.
Ratios are those within a turn: judge by them. "At best" is the ratio of each batch's fastest
iterations. CPU is the processor time of both workers, without their waiting. Planning, making
programs and reading data for PyTorch are not in the time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.comparison import TABLES, Found, Row, Turn, report
from benchmarks.directed import Directed
from benchmarks.plain import Pipelined, Rectangles, Replicated
from benchmarks.static_plans import TARGETS, Chooser, other
from benchmarks.stdlib_data import StdlibData
from benchmarks.two_workers import meet
from megatron_flex.arguments import parse
from megatron_flex.config.config import Config
from megatron_flex.data.bar import progress_bar, shown
from megatron_flex.data.batches import BatchSource
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.link_speed import host_link
from megatron_flex.loop.assemble import Parts, assemble
from megatron_flex.planner.plan import Plan
from megatron_flex.profiling import Workbench, fit, grid, measure
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.host_allocator import keep_freed_memory
from megatron_flex.runtime.machine import machine_name
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.world import World
from tools.profile_layers import intra_link

CPU = torch.device("cpu")
STEP = StepSize(1e-4, 0.01)
SLICED = "--flexpipe-slice-tokens auto"
PLANNED = "--flexpipe --flexpipe-schedule zb"
ALWAYS = ("1f1b", "zb-v")
"""Rows that the others are compared with."""
PADDED = (512, 1024, 2048)
"""Tokens of a micro-batch with its padding: what is tried for data-parallel replicas."""


@dataclass(frozen=True)
class Place:
    """Where things are, and what the user chose."""

    data: StdlibData
    work: Path
    arguments: argparse.Namespace

    @property
    def profile(self) -> Path:
        """What the model's parts cost."""
        return self.work / "profile.json"

    def open(
        self, data: str, plan: str, flags: str = "--flexpipe-slice-tokens 0"
    ) -> tuple[Config, Parts]:
        """Configuration, data and model of a row."""
        given = self.arguments
        prefix = self.data.prefix if data == "real" else self.work / "equal"
        hidden, longest = given.hidden_size, given.seq_length
        words = (
            f"--num-layers {given.layers} --hidden-size {hidden} --num-attention-heads"
            f" {max(1, hidden // 64)} --seq-length {longest} --max-position-embeddings {longest}"
            f" --data-path {prefix} --split 1,0,0 --tokenizer-type SentencePieceTokenizer"
            f" --tokenizer-model {self.data.tokenizer} --hidden-dropout 0 --attention-dropout 0"
            f" --untie-embeddings-and-output-weights --lr {STEP.learning_rate}"
            f" --global-batch-size {given.samples} --train-iters 1000 --distributed-backend gloo"
            f" {flags}"
        ).split()
        if self.profile.exists():
            words += ["--flexpipe-profile", str(self.profile)]
        # Batches are cut as the plan says, or the flags.
        given_by_plan = "cut" in plan or "batching" in flags
        words += ["--flexpipe-plan", plan if given_by_plan else f"{plan} ; cut {longest}"]
        config = parse(words, world_size=2)
        return config, assemble(config)

    @property
    def one_stage(self) -> str:
        """The plan that holds all units on both workers."""
        return f"0:{2 * self.arguments.layers + 2}@0,1"

    def batches(self, parts: Parts) -> list[GlobalBatch]:
        """The global batches that are trained on, in turn."""
        assert parts.train is not None
        size = self.arguments.samples
        return [parts.train.batch(size * i, size) for i in range(self.arguments.batches)]

    def write_profile(self) -> None:
        """Measure the model's parts on one thread."""
        torch.set_num_threads(1)
        _, parts = self.open("real", self.one_stage)
        bench, longest = Workbench(parts.model, CPU), self.arguments.seq_length
        shapes = grid([longest // 8, longest // 2, longest], [64, 256])
        link = intra_link(CPU)
        links = {"host": host_link(CPU), **({} if link is None else {"intra": link})}
        profile = fit(bench, measure(bench, shapes, 5), shapes, "benchmark", links)
        self.profile.write_text(profile.to_json())


def baselines(place: Place, data: str, lengths: Sequence[tuple[int, ...]]) -> Iterator[Row]:
    """Each with the layout and the micro-batches that are fastest by simulation."""
    samples, longest = place.arguments.samples, max(map(max, lengths))
    counts = [n for n in (1, 2, 3, 4, 6, 8, 12) if n < samples]
    wanted = place.arguments.rows
    for name, schedule in (("megatron-pad", "1f1b"), ("zero-bubble-pad", "zb-v")):
        if wanted and name not in wanted:
            continue
        flags = [f"--flexpipe-batching pad-batch --micro-batch-size {n}" for n in counts]
        yield _tuned(place, data, lengths, name, schedule, flags)
    budgets = [tokens for tokens in (256, 512, 1024, 2048) if tokens <= 2 * longest]
    flags = [f"--flexpipe-batching bucket --micro-batch-tokens {n}" for n in budgets]
    for name, every in (("bucket", flags), ("dynapipe", ["--flexpipe-batching dynapipe"])):
        if not wanted or name in wanted:
            yield _tuned(place, data, lengths, name, "1f1b", every)


def _tuned(
    place: Place,
    data: str,
    lengths: Sequence[tuple[int, ...]],
    name: str,
    schedule: str,
    every: Sequence[str],
) -> Row:
    found: list[tuple[float, Row]] = []
    for flags in every:
        chooser = Chooser(*place.open(data, place.one_stage, flags), lengths)
        if "bucket" in flags or "dynapipe" in flags:
            for layout in chooser.layouts:
                seconds, plans = chooser.by_batch(f"{layout} ; schedule {schedule}")
                found.append((seconds, Row(name, data, "ours", plans[0], flags, plans=plans)))
        else:
            seconds, plan = chooser.fastest_layout(schedule, v=schedule == "zb-v")
            found.append((seconds, Row(name, data, "ours", plan, flags)))
    return min(found, key=lambda one: one[0])[1]


def rows_of(place: Place) -> list[Row]:
    """All rows, with plans that are chosen by simulation."""
    samples, wanted = place.arguments.samples, place.arguments.lengths
    counts = tuple(c for c in place.arguments.micro_batches if samples % c == 0)
    rows: list[Row] = []
    for data in shown(wanted, "choosing plans"):
        config, parts = place.open(data, place.one_stage)
        lengths = [tuple(batch.lengths.tolist()) for batch in place.batches(parts)]
        chooser = Chooser(config, parts, lengths)
        straight, v = chooser.fastest("1f1b", v=False), chooser.fastest("zb-v", v=True)
        rows += [
            Row("1f1b", data, "ours", straight),
            Row("zb-h1", data, "ours", other(straight, "zb-h1")),
            Row("zb-v", data, "ours", v),
            Row("zb", data, "ours", chooser.best([other(plan, "zb") for plan in (straight, v)])),
        ]
        if data == "real":
            sliced = Chooser(*place.open(data, place.one_stage, SLICED), lengths)
            plans = [other(plan, "zb", target) for plan in (straight, v) for target in TARGETS]
            rows.append(Row("slices", data, "ours", sliced.best(plans), SLICED))
            rows += baselines(place, data, lengths)
            planner = Chooser(*place.open(data, straight, PLANNED), lengths)
            each = planner.planned(place.arguments.simulations)
            rows.append(Row("flexpipe", data, "ours", each[0], PLANNED, plans=each))
        padded = Chooser(config, parts, [(max(of_one),) * samples for of_one in lengths])
        for name, schedule in (("PyTorch 1F1B", "1f1b"), ("PyTorch ZBV", "zb-v")):
            plan = padded.of_whole_layers(schedule, v=schedule == "zb-v")
            rows.append(Row(name, data, "pipelined", plan, choices=counts))
        if data == "real":
            rows.append(Row("PyTorch DDP", data, "replicated", place.one_stage, choices=PADDED))
    some = place.arguments.rows
    return [row for row in rows if not some or row.name in (*some, *ALWAYS)]


Prepared = tuple[Callable[[], float], float]
"""Runs an iteration and gives this worker's part of the loss; the seconds that were simulated."""


class Runner:
    """One row on one worker."""

    def __init__(self, place: Place, row: Row, world: World) -> None:
        self.row, self._rank = row, world.rank
        config, parts = place.open(row.data, row.plan, row.flags)
        assert parts.train is not None
        self._source: BatchSource = parts.train
        self.batches = place.batches(parts)
        self.choice = row.choices[0]
        self._turns = turns_of(row, place.arguments.batches, place.arguments.cycles)
        self._done = 0
        model, plan = parts.model, parts.plan
        if row.kind == "ours":
            executor = Executor(world, Holdings(model, plan, world.rank, CPU), OptimizerConfig())
            self._ours = Directed(config, parts, plan, executor)
        elif row.kind == "pipelined":
            self._pipelined = Pipelined(model, plan, world.rank, STEP)
        else:
            self._replicated = Replicated(model, world.rank, STEP)

    def prepare(self, number: int) -> Prepared:
        """What an iteration on batch ``number`` is; making programs and reading are done here."""
        batch, source = self.batches[number], self._source
        tokens = batch.denominators[0]
        assert self._turns[self._done] == number, "turns are in the order of turns_of"
        self._done += 1
        if self.row.kind == "ours":
            ours, iterations = self._ours, self._ours.iterations
            iterations.plan = Plan.parse(self.row.plan_for(number))  # perhaps cut otherwise
            after = self._turns[min(self._done, len(self._turns) - 1)]
            following = Plan.parse(self.row.plan_for(after))
            told, cut = ours.told(batch, following)

            def run() -> float:
                result = iterations.train(source, batch, STEP, told, cut, following=following)
                return result.losses[0] if self._rank == 0 else 0.0

            return run, told.seconds + ours.switch_seconds(batch, following)
        if self.row.kind == "pipelined":
            whole = Rectangles(source, batch, range(batch.size))
            return lambda: self._pipelined.train(whole, tokens, self.choice), 0.0
        mine = [Rectangles(source, batch, part) for part in self._share(batch)]
        return lambda: self._replicated.train(mine, tokens), 0.0

    def _share(self, batch: GlobalBatch) -> Iterator[list[int]]:
        """This worker's samples, longest first, in micro-batches of at most so many tokens."""
        order = np.argsort(-batch.lengths, kind="stable").tolist()
        mine = [i for place, i in enumerate(order) if (place + 1) // 2 % 2 == self._rank]
        part: list[int] = []
        for i in mine:
            if part and (len(part) + 1) * batch.lengths[part[0]] > self.choice:
                yield part
                part = []
            part.append(i)
        yield part


def turns_of(row: Row, batches: int, cycles: int) -> list[int]:
    """The batches that a row trains on, in order: two of each choice, all, and those that count."""
    return (
        [0] * 2 * len(row.choices) + list(range(1, batches)) + [c % batches for c in range(cycles)]
    )


def worker(rank: int, place: Place, rows: Sequence[Row]) -> None:
    """One of the two workers; the first writes what the iterations took."""
    keep_freed_memory()
    world = meet(rank, f"{place.work}/meet")
    runners = [Runner(place, row, world) for row in rows]
    cycles, batches = place.arguments.cycles, place.arguments.batches
    total = sum(2 * len(r.choices) for r in rows) + len(rows) * (batches - 1 + cycles)
    bar = None if rank else progress_bar(total, "training", unit=" iterations")

    def turn(number: int, batch: int) -> Turn:
        run, simulated = runners[number].prepare(batch)
        world.barrier()
        began, busy = time.perf_counter(), time.process_time()
        loss = run()
        seconds = world.slowest(time.perf_counter() - began)
        work = world.sum(time.process_time() - busy)
        if bar is not None:
            bar.update(1)
        tokens = runners[number].batches[batch].tokens
        return Turn(number, batch, seconds, work, simulated, tokens, world.sum(loss))

    firsts = []
    for number, row in enumerate(rows):
        tried = {}
        for choice in row.choices:
            runners[number].choice = choice
            # PyTorch makes its buffers in the first iteration of a shape.
            tried[choice] = [turn(number, 0) for _ in range(2)]
        firsts += tried[row.choices[0]]
        best = min(tried, key=lambda choice: min(t.seconds for t in tried[choice]))
        runners[number].choice = best
    for batch in range(1, batches):
        for number in range(len(rows)):
            turn(number, batch)
    turns = [turn(n, c % batches) for c in range(cycles) for n in range(len(rows))]
    if bar is not None:
        bar.close()
        found = Found([r.choice for r in runners], firsts, turns)
        (place.work / "found.json").write_text(json.dumps(asdict(found)))
    dist.destroy_process_group()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="directory for the data set, to keep it")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--seq-length", type=int, default=1024, help="longer samples end there")
    parser.add_argument("--equal", type=int, default=256, help="tokens where all are equal")
    parser.add_argument("--samples", type=int, default=12, help="of a global batch")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 6, 12],
                        help="numbers of them to try for PyTorch's pipelines")  # fmt: skip
    parser.add_argument("--lengths", choices=TABLES, nargs="+", default=list(TABLES))
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these, 1f1b and zb-v")
    parser.add_argument("--simulations", type=int, default=100, help="of a planner's decision")
    parser.add_argument("--batches", type=int, default=3, help="global batches, taken in turn")
    parser.add_argument("--cycles", type=int, default=7, help="iterations of each row")
    arguments = parser.parse_args()
    if arguments.cycles < 2:
        parser.error("--cycles must be at least 2: one time has no quartiles")
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        place = Place(StdlibData(arguments.data or work / "data"), work, arguments)
        place.data.write()
        place.data.write_equal(work / "equal", arguments.equal)
        place.write_profile()
        rows = rows_of(place)
        mp.spawn(worker, (place, rows), nprocs=2)
        found = Found.of(json.loads((work / "found.json").read_text()))
    print(f"{machine_name(CPU)}; {os.cpu_count()} cores; load {os.getloadavg()[1]:.1f}")
    report(rows, found)


if __name__ == "__main__":
    main()
