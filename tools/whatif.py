#!/usr/bin/env python3
"""What would training take with your lengths, model and cluster, and what is each part worth?

    python tools/whatif.py --model gpt-13b --cluster a100x32 --long-share 0.05
    python tools/whatif.py --model gpt-3.35b --cluster a100x16 --lengths-file lengths.csv --jobs 2
    python tools/whatif.py --workers 2 FLAGS-OF-A-TRAINING-COMMAND

Simulates (docs/simulator.md) the best static plans that there are, whole samples packed or padded,
or in slices; FlexPipe; FlexPipe without one of its parts; and layers shared by devices of a
server, under one static plan and under FlexPipe. Says which is the fastest, what each part gains,
and the flags to train so, as one command. The runs are kept in ``--output``, with a page to look at
(report.html); the same command goes on where it was interrupted.

The last form is for a training command as it stands: its model, its batches in the order of
training, its cluster, profile and budget (--flexpipe-cluster, --flexpipe-profile and
--flexpipe-memory-budget-gb).
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.cluster.cluster import description
from megatron_flex.data.bar import shown
from megatron_flex.data.errors import DataError
from megatron_flex.loop.devices import cluster_of
from megatron_flex.loop.questions import ABOUT, Run, read_run
from megatron_flex.planner.plan import PlanError
from megatron_flex.planner.tensor_choice import sizes
from megatron_flex.report.page import page
from megatron_flex.report.read import RunData
from megatron_flex.report.read import read_run as read_log
from megatron_flex.signals import run_tool
from megatron_flex.simulator.files import is_of
from megatron_flex.simulator.sources import read_batches
from megatron_flex.simulator.summary import row, table
from megatron_flex.simulator.tensor import divides
from megatron_flex.telemetry.files import replace
from megatron_flex.tokenizers.base import TokenizerError
from tools import simulate
from tools.simulate import Outcome, Work

OURS = "flexpipe"
STATIC = (
    "static-slices", "seq1f1b", "packed-1f1b", "packed-zero-bubble", "dynapipe", "bucket",
    "zero-bubble-pad", "megatron-pad",
)  # fmt: skip
SHARED = "tensor-parallel"
PARTS = {
    "no-slices": "slices of long samples",
    "fused-backward": "a split backward",
    "no-v": "two stages on each device, in a V",
    "whole-layers": "cuts inside layers",
    "no-switches": "switches of the plan",
    "no-lookahead": "look-ahead over batches",
    "no-o-plan": "recompute and offload",
}
"""What FlexPipe is simulated without."""
ON_THE_PAGE = 5
"""Runs side by side, at most."""
OUTPUT = Path("runs/whatif")


def parser(beside_a_run: bool = False) -> argparse.ArgumentParser:
    """All flags, or those that go with a training command's."""
    if not beside_a_run:
        p = simulate.parser()
        p.description = __doc__.removeprefix("#!/usr/bin/env python3\n")
        p.epilog = ABOUT
        p.set_defaults(iterations=12, tuning_batches=4, output=OUTPUT,
                       configurations=[OURS, *STATIC, SHARED, *PARTS])  # fmt: skip
    else:
        p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
        p.add_argument("--iterations", type=int, default=12, help="of the run, from its first")
        p.add_argument("--tuning-batches", type=int, default=4)
        p.add_argument("--simulations", default="12", metavar="{auto,N}")
        p.add_argument("--output", type=Path, default=OUTPUT)
        p.add_argument("--jobs", type=int, default=1, help="configurations at a time")
        p.add_argument("--configurations", nargs="+", default=[OURS, *STATIC, SHARED, *PARTS])
    p.add_argument("--no-page", action="store_true", help="print the tables only")
    return p


def words_of(args: argparse.Namespace, run: Run) -> list[str]:
    """A training command as flags of tools/simulate.py; its model and lengths become files."""
    output, f = args.output, run.config.flexpipe
    output.mkdir(parents=True, exist_ok=True)
    cluster = cluster_of(run.config, run.config.devices)
    (output / "cluster.json").write_text(json.dumps(description(cluster)))
    (output / "model.json").write_text(json.dumps(asdict(run.parts.model)))
    batches = run.lengths(args.iterations)
    (output / "batches.txt").write_text("".join(f"{' '.join(map(str, b))}\n" for b in batches))
    words = [
        "--model", output / "model.json", "--cluster", output / "cluster.json",
        "--batch-file", output / "batches.txt", "--output", output,
        "--seq-length", run.config.data.max_sample_length,
        "--global-batch-size", run.config.training.global_batch_size,
        *(word for name in ("iterations", "tuning_batches", "simulations", "jobs")
          for word in (f"--{name.replace('_', '-')}", getattr(args, name))),
        "--configurations", *args.configurations,
    ]  # fmt: skip
    if f.flexpipe_profile is not None and not f.measures:
        words += ["--profile", f.flexpipe_profile]
    if f.flexpipe_memory_budget_gb is not None:
        words += ["--memory-budget-gb", f.flexpipe_memory_budget_gb]
    if run.config.parallel.use_distributed_optimizer:
        words.append("--use-distributed-optimizer")
    return list(map(str, words))


def works_of(args: argparse.Namespace, *, shares: bool) -> list[Work]:
    """What is simulated; with ``shares`` FlexPipe over groups that share layers, too."""
    names = list(dict.fromkeys(args.configurations))
    works = [Work(name, args, args.output) for name in names]
    if not (shares and {OURS, SHARED} <= set(names)):
        return works
    full = simulate.setting_of(args).full
    possible = sizes(full.devices, full.cluster.devices_per_server)[1:]
    together = argparse.Namespace(**{**vars(args), "sequence_parallel": True})
    return works + [
        Work(OURS, together, args.output, size) for size in possible if divides(full.config, size)
    ]


@dataclass(frozen=True)
class Answer:
    """All that was simulated, by name."""

    found: dict[str, Outcome]

    @property
    def fastest(self) -> str:
        """Of what the trainer can run."""
        return self._best([OURS, *self._shared, *STATIC])

    @property
    def _shared(self) -> list[str]:
        """FlexPipe over groups of devices that share layers."""
        return [name for name in self.found if re.fullmatch(rf"{OURS}-tp\d+", name)]

    @property
    def best_shared(self) -> str:
        """The fastest of them; empty where there are none."""
        return self._best(self._shared)

    @property
    def best_static(self) -> str:
        """The fastest plan that stays; empty where none fits."""
        return self._best(STATIC)

    @property
    def best_whole(self) -> str:
        """The fastest of all that cut no sample."""
        return self._best([n for n in STATIC if n not in ("static-slices", "seq1f1b")])

    def _best(self, names: Sequence[str]) -> str:
        known = [n for n in names if n in self.found]
        return max(known, key=lambda n: self.found[n].summary.rate, default="")

    def times(self, name: str, base: str) -> float:
        """How many times as fast as ``base``."""
        return self.found[name].summary.rate / self.found[base].summary.rate

    def lines(self) -> Iterator[str]:
        """What follows from the table."""
        if not self.fastest:
            return
        fastest = self.found[self.fastest].summary
        yield (
            f"fastest: {self.fastest}, {fastest.rate:,.0f} tokens/s, {fastest.balance:.2f} times as"
            " long as perfect balance"
        )
        if OURS in self.found:
            for name, what in (
                (self.best_static, "the best static plan"),
                (self.best_whole, "the best one with whole samples"),
                (SHARED if SHARED in self.found else "", "the best one with shared layers"),
            ):
                if name:
                    ratio = self.times(OURS, name)
                    yield f"  FlexPipe is {ratio:.2f} times as fast as {what}, {name}"
            if name := self.best_shared:
                size = name.rpartition("-tp")[2]
                ratio = self.times(name, OURS)
                yield (
                    f"  with layers that {size} devices of a server share it is {ratio:.2f} times"
                    f" as fast as without, {name}"
                )
            parts = {name: what for name, what in PARTS.items() if name in self.found}
            if parts:
                yield "what FlexPipe gains by"
            for name, what in parts.items():
                yield f"  {what:36}{self.times(OURS, name) - 1.0:+8.1%}  ({name})"

    @property
    def on_page(self) -> list[str]:
        """Runs to look at side by side, the fastest first."""
        ranked = sorted(self.found, key=lambda n: -self.found[n].summary.rate)
        first = [OURS, self.best_shared, self.best_static, self.best_whole, "packed-1f1b", *ranked]
        return list(dict.fromkeys(n for n in first if n in self.found))[:ON_THE_PAGE]


def command(args: argparse.Namespace, run: Run | None, given: Sequence[str], own: list[str]) -> str:
    """How to train so."""
    if run is not None:
        script = f"pretrain_{run.config.architecture}.py"
        left_out = _flags_of(own) | {"--micro-batch-size", "--micro-batch-tokens"}
        return shlex.join(
            ["torchrun", "--nproc-per-node", str(run.config.world_size), script,
             *_without(given, left_out), *own]
        )  # fmt: skip
    full = simulate.setting_of(args).full
    words = [
        "torchrun", "--nnodes", str(full.cluster.servers),
        "--nproc-per-node", str(full.cluster.devices_per_server),
        f"pretrain_{full.config.architecture}.py", "--global-batch-size", str(_batch_size(args)),
        "--seq-length", str(args.seq_length), "--flexpipe-cluster", args.cluster,
    ]  # fmt: skip
    if args.profile is not None:
        words += ["--flexpipe-profile", str(args.profile)]
    if args.memory_budget_gb is not None:
        words += ["--flexpipe-memory-budget-gb", str(args.memory_budget_gb)]
    if args.use_distributed_optimizer:
        words.append("--use-distributed-optimizer")
    return f"{shlex.join([*words, *own])} ...\n(... stands for model, data and learning rate)"


def _batch_size(args: argparse.Namespace) -> int:
    """Samples of a batch; of given ones that which most of them have."""
    if args.batch_file is None:
        return int(args.global_batch_size)
    counts = Counter(map(len, read_batches(args.batch_file)))
    return counts.most_common(1)[0][0]


def _flags_of(words: Sequence[str]) -> set[str]:
    """With the layouts that exclude each other."""
    flags = {word for word in words if word.startswith("--")}
    layout = {"--flexpipe-plan", "--pipeline-model-parallel-size", "--flexpipe-plans",
              "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage",
              "--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers",
              "--decoder-last-pipeline-num-layers"}  # fmt: skip
    ours = {"--flexpipe", "--flexpipe-planner", "--flexpipe-slice-tokens", "--flexpipe-batching",
            "--flexpipe-baseline", "--flexpipe-schedule"}  # fmt: skip
    return flags | layout | ours


def _without(words: Sequence[str], flags: set[str]) -> list[str]:
    """Words of a command without some flags and their values."""
    found: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word.partition("=")[0] in flags
        if not skipping:
            found.append(word)
    return found


def _may_write(work: Work) -> bool:
    """Whether its file is not that of another question."""
    try:
        return is_of(work.file, simulate.header_of(work))
    except (ValueError, OSError):
        return True  # it cannot be simulated, which is said of it alone


def write_page(answer: Answer, directory: Path) -> Path:
    """The page of the runs that say most."""
    runs: list[RunData] = [read_log([directory / f"{n}.jsonl"], n) for n in answer.on_page]

    def progress(positions: Sequence[int]) -> Iterator[int]:
        return shown(positions, "make figures", unit=" iterations")

    path = directory / "report.html"
    replace(path, [page(runs, progress=progress).encode()])
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, say what is best, and write the page; the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    began = time.perf_counter()
    try:
        args, run = read_run(parser, given)
        no_page = args.no_page
        if run is not None:
            given = _own(given)
            args = simulate.parser().parse_args(words_of(args, run))
        wrong = simulate.problem(args)
        if wrong:
            raise ValueError(wrong)
    except (DataError, PlanError, TokenizerError, ValueError, OSError) as error:
        print(f"whatif: {error}", file=sys.stderr)
        return 1
    works = works_of(
        args, shares=run is None or run.config.parallel.tensor_model_parallel_size == 1
    )
    if not all(_may_write(work) for work in works):
        print(
            f"whatif: --output {args.output} has the answer to another question: give another"
            " directory, or remove that one",
            file=sys.stderr,
        )
        return 1
    results = list(simulate.results(works, args.jobs, len(works) * args.iterations))
    found = {work.title: result for work, result in results if isinstance(result, Outcome)}
    for work, result in results:
        if isinstance(result, str):
            print(f"whatif: {work.title}: {result}", file=sys.stderr)
    if not found:
        return 1
    answer = Answer(found)
    ranked = sorted(found, key=lambda n: -found[n].summary.rate)
    print(table([row(name, found[name].summary) for name in ranked]), end="\n\n")
    print("\n".join(answer.lines()))
    for name in dict.fromkeys((answer.fastest, answer.best_static)):
        if name and found[name].flags:
            print(f"\n{name}:\n{command(args, run, given, found[name].flags)}")
    if not no_page:
        print(f"\n{write_page(answer, args.output)} ({time.perf_counter() - began:.1f} s)")
    return 0


def _own(words: Sequence[str]) -> list[str]:
    """A training command's words, without those of this tool."""
    own = {o for a in parser(True)._actions for o in a.option_strings}
    return _without(words, own | {"--workers", "--architecture"})


if __name__ == "__main__":
    run_tool(main)
