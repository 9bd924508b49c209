#!/usr/bin/env python3
"""Simulate training on a cluster that is only described, for FlexPipe and for what it replaces.

    python tools/simulate.py --model gpt-3.35b --cluster a100x16 --iterations 100
    python tools/simulate.py --configurations flexpipe packed-1f1b dynapipe --jobs 2 --output runs
    python tools/simulate.py --list

Every iteration is planned by the real planner and takes what its schedule takes on the described
devices and links, with messages, reductions, updates, memory and switches. Batches are drawn from
the published FLANv2 length statistics (``--long-share``: some of the samples are long); from the
lengths of a data set (``--data-path`` of a .bin/.idx, its documents in training's order);
from a file (``--lengths-file``: one length a line, or a CSV with a column ``length``); or they
are given (``--batch-file``: a batch a line).

Baselines are tuned first, as their users would: every even layout, schedule and size of
micro-batch that they may have, over a sample of the run's own batches. With ``--output DIR``
each configuration writes DIR/NAME.jsonl, a line an iteration with the trainer's field names
(docs/logging.md); the same command goes on where it was interrupted. The same arguments give the
same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.cluster.cluster import ClusterError, load
from megatron_flex.cluster.profile import Profile, ProfileError
from megatron_flex.data.bar import progress_bar
from megatron_flex.data.errors import DataError
from megatron_flex.data.mock import LONGEST
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.decision import Infeasible
from megatron_flex.planner.memory import total_parameters
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import PlanError
from megatron_flex.planner.presets import MODELS, model
from megatron_flex.planner.tensor import TensorParallel
from megatron_flex.processes import ProcessDied, Processes
from megatron_flex.quantities import memory_budget
from megatron_flex.signals import run_tool
from megatron_flex.simulator.files import EVERY, SimulationFile
from megatron_flex.simulator.presets import CONFIGURATIONS, PLANNED, STATIC
from megatron_flex.simulator.run import Span, open_simulation, setup_of
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.sources import Given, Listed, Mixture, Source, read_batches, read_csv
from megatron_flex.simulator.summary import Summary, row, table
from megatron_flex.telemetry.sink import TelemetryError

DEFAULT = (
    "flexpipe",
    "static-slices",
    "dynapipe",
    "packed-1f1b",
    "zero-bubble-pad",
    "megatron-pad",
)


OWN_SIZES = ("tensor-parallel", "context-parallel")
"""Configurations whose devices share layers or samples as they are tuned."""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = argparse.ArgumentParser(
        description=__doc__.removeprefix("#!/usr/bin/env python3\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--list", action="store_true", help="say what configurations there are")
    p.add_argument("--configurations", nargs="+", default=list(DEFAULT), metavar="NAME",
                   help=f"what to simulate; default {' '.join(DEFAULT)}")  # fmt: skip
    p.add_argument("--model", default="gpt-3.35b",
                   help=f"one of {', '.join(MODELS)}, or a JSON file")  # fmt: skip
    p.add_argument(
        "--cluster", default="a100x16",
        help="a described cluster (a100, h200, cpu, with xN for N devices), or a file",
    )  # fmt: skip
    p.add_argument("--profile", type=Path, help="a profile measured by tools/profile_layers.py")
    p.add_argument("--iterations", type=int, default=100)
    p.add_argument("--global-batch-size", type=int, default=32, help="samples of a batch")
    p.add_argument("--seq-length", type=int, default=LONGEST,
                   help="longer samples are cut off there")  # fmt: skip
    p.add_argument("--seed", type=int, default=1234)
    source = p.add_mutually_exclusive_group()
    source.add_argument("--long-share", type=float, default=0.0,
                        help="part of the samples that are long")  # fmt: skip
    source.add_argument("--data-path", help="prefix of a .bin/.idx: the lengths of its documents")
    source.add_argument("--lengths-file", type=Path, help="a length a line, or a CSV")
    source.add_argument("--batch-file", type=Path,
                        help="a batch a line: lengths of its samples; taken in turn")  # fmt: skip
    p.add_argument("--long-median", type=int, default=16000, help="tokens of long samples")
    p.add_argument("--tuning-batches", type=int, default=16,
                   help="batches that static plans are tuned over")  # fmt: skip
    p.add_argument(
        "--simulations", default="12", metavar="{auto,N}",
        help="plans that a decision simulates; auto: as many as 30 %% of the iteration holds at the"
        " rate that a run begins with",
    )  # fmt: skip
    p.add_argument(
        "--search-every", type=int, default=1, metavar="N",
        help="search for a plan every N iterations, and take the best known one in between: faster",
    )  # fmt: skip
    p.add_argument(
        "--segments", type=int, default=1, metavar="N",
        help="parts that begin as a run does, knowing no plans: --jobs can simulate them together",
    )  # fmt: skip
    p.add_argument("--programs", action="store_true",
                   help="decide by whole programs, as training does: exact memory")  # fmt: skip
    p.add_argument("--memory-budget-gb", type=float, help="of a device; default: the cluster's")
    p.add_argument("--use-distributed-optimizer", action="store_true",
                   help="optimizer state split over replicas, everywhere")  # fmt: skip
    p.add_argument(
        "--tensor-model-parallel-size", type=int, nargs="+", default=[1], metavar="N",
        help="devices of a server that share each layer; with several numbers every configuration"
        " is simulated with each",
    )  # fmt: skip
    p.add_argument("--sequence-parallel", action="store_true",
                   help="they share what lies between the products, too")  # fmt: skip
    p.add_argument("--output", type=Path, help="directory of a JSONL file for each")
    p.add_argument("--jobs", type=int, default=1, help="configurations at a time")
    return p


@dataclass(frozen=True)
class Work:
    """One configuration, or one segment of it, for a process of its own.

    ``size`` devices share each layer.
    """

    name: str
    arguments: argparse.Namespace
    directory: Path
    size: int = 1
    segment: int | None = None

    @property
    def title(self) -> str:
        """The name, and the size if there is one."""
        return self.name if self.size == 1 else f"{self.name}-tp{self.size}"

    @property
    def iterations(self) -> range:
        """What is to be simulated."""
        total, parts = self.arguments.iterations, self.arguments.segments
        if self.segment is None:
            return range(total)
        return range(total * self.segment // parts, total * (self.segment + 1) // parts)

    @property
    def file(self) -> Path:
        """Where it goes."""
        if self.segment is None:
            return self.directory / f"{self.title}.jsonl"
        return self.directory / "segments" / f"{self.title}-{self.segment + 1}.jsonl"

    @property
    def segments(self) -> list[Work]:
        """Itself, or its parts."""
        if self.arguments.segments == 1:
            return [self]
        return [replace(self, segment=number) for number in range(self.arguments.segments)]


def setting_of(args: argparse.Namespace, size: int = 1) -> Setting:
    """The model on the cluster, with ``size`` devices that share each layer."""
    config, cluster = model(args.model), load(args.cluster)
    profile = Profile.load(args.profile) if args.profile else closed_form_profile(config, cluster)
    budget = memory_budget(args.memory_budget_gb, "--memory-budget-gb")
    base = PlannerOptions(budget=budget, shard_optimizer=args.use_distributed_optimizer)
    tensor = TensorParallel(size, args.sequence_parallel and size > 1)
    return Setting(config, cluster, profile, base).shared(tensor).thinned


def source_of(args: argparse.Namespace) -> Source:
    """Where lengths come from."""
    size, seed, longest = args.global_batch_size, args.seed, args.seq_length
    if args.batch_file is not None:
        return Given(read_batches(args.batch_file), longest)
    if args.lengths_file is not None:
        return Listed(read_csv(args.lengths_file), size, seed, longest)
    if args.data_path is not None:
        return Listed(_document_lengths(args.data_path), size, seed, longest)
    return Mixture(size, seed, longest, args.long_share, args.long_median)


def _document_lengths(prefix: str) -> Any:
    import numpy as np

    from megatron_flex.data.indexed import IndexedDocuments  # it loads megatron-core

    documents = IndexedDocuments(_prefix(prefix))
    lengths = documents.lengths(np.arange(documents.num_documents))
    return lengths[lengths > 0]


def _prefix(path: str) -> str:
    return path.removesuffix(".idx").removesuffix(".bin")


def span_of(args: argparse.Namespace) -> Span:
    """What is simulated."""
    for name in ("iterations", "tuning_batches", "jobs", "search_every", "segments"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if args.segments > args.iterations:
        raise ValueError("--segments must not be more than --iterations")
    given = args.simulations
    if given != "auto" and not given.isdecimal():
        raise ValueError(f"--simulations {given}: expected a number, or auto")
    count = None if given == "auto" else int(given)
    every = args.search_every
    return Span(source_of(args), args.iterations, args.tuning_batches, count, args.programs, every)


def contents_of(args: argparse.Namespace) -> dict[str, str]:
    """Digests of the files that arguments name: another content is another simulation."""
    files = {name: getattr(args, name) for name in ("model", "cluster", "profile", "lengths_file",
                                                    "batch_file")}  # fmt: skip
    if args.data_path is not None:
        files["data_path"] = f"{_prefix(args.data_path)}.idx"
    found = {}
    for name, path in files.items():
        if path is not None and Path(path).is_file():
            content = xxhash.xxh3_64()
            with open(path, "rb") as file:
                while piece := file.read(1 << 20):
                    content.update(piece)
            found[f"{name} holds"] = content.hexdigest()
    return found


def header_of(work: Work) -> dict[str, Any]:
    """What the file of a configuration says that it is."""
    left_out = ("configurations", "list", "output", "jobs")
    given = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in sorted(vars(work.arguments).items())
        if name not in left_out and value != parser().get_default(name)
    }
    given |= contents_of(work.arguments)
    given.pop("tensor_model_parallel_size", None)
    if work.size > 1:
        given["tensor_model_parallel_size"] = work.size
    if work.segment is not None:
        given["segment"] = work.segment
    setting = setting_of(work.arguments, work.size)
    header = {
        "configuration": work.title,
        "workers": setting.devices * setting.width,
        "train_iters": work.arguments.iterations,
        "parameters": total_parameters(setting.config),
        "budget": setting.budget,
        "arguments": given,
    }
    if setting.width > 1:
        header["width"] = setting.width
    setup = setup_of(work.name, setting)
    return header if setup is None else {**header, "setup": setup.to_json()}


@dataclass(frozen=True)
class Outcome:
    """One configuration.

    Attributes:
        summary: totals.
        about: what it settled on, in words.
        flags: of the trainer, to run it so; empty: it can't.
        seconds: of this machine.
    """

    summary: Summary
    about: str
    flags: list[str]
    seconds: float


def simulate(work: Work, step: Callable[[], object]) -> Outcome:
    """Simulate what is left of one configuration.

    Raises:
        ValueError: it cannot be simulated; the message says why.
    """
    began = time.perf_counter()
    setting = setting_of(work.arguments, work.size)
    span = span_of(work.arguments).of(setting)
    file, numbers = SimulationFile(work.file, header_of(work)), work.iterations
    try:
        for _ in range(file.start):
            step()
        known = file.state or {}
        about, flags = known.get("about", ""), known.get("flags", [])
        if file.start < len(numbers):
            simulation = open_simulation(work.name, setting, span)
            about, flags = simulation.about, simulation.flags
            if file.state is not None:
                try:
                    simulation.restore(file.state)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise file.damaged from error
            for done, number in enumerate(numbers[file.start :], file.start + 1):
                file.add(simulation.step(number))
                if done % EVERY == 0 or done == len(numbers):
                    file.save(done, {**simulation.state(), "about": about, "flags": flags})
                step()
        summary = Summary.of(file.records())
        return Outcome(summary, about, flags, time.perf_counter() - began)
    finally:
        file.close()


Result = Outcome | str
"""Or what is wrong."""


def attempt(work: Work, step: Callable[[], object]) -> Result:
    """:func:`simulate`, or what is wrong in words."""
    try:
        return simulate(work, step)
    except (Infeasible, PlanError, TelemetryError, ValueError, OSError) as error:
        return str(error)


def _attempts(step: Callable[[], object]) -> Callable[[Work], Result]:
    return partial(attempt, step=step)


def _result(future: Future[Result]) -> Result:
    try:
        return future.result()
    except ProcessDied as error:
        return f"{error}; the same command goes on with --output, and fewer --jobs need less memory"


def joined(work: Work, parts: Sequence[Result]) -> Result:
    """The result of a configuration from those of its segments; its file from theirs."""
    wrong = next((part for part in parts if isinstance(part, str)), None)
    if wrong is not None:
        return wrong
    found = [part for part in parts if isinstance(part, Outcome)]
    if work.arguments.segments == 1:
        return found[0]
    file = SimulationFile(work.file, header_of(work))
    try:
        if file.start < len(work.iterations):
            for segment in work.segments:
                for line in segment.file.read_bytes().splitlines()[1:]:
                    file.add(json.loads(line))
            state = {"about": found[0].about, "flags": found[0].flags}
            file.save(len(work.iterations), state)
        summary = Summary.of(file.records())
    finally:
        file.close()
    seconds = sum(part.seconds for part in found)
    return Outcome(summary, found[0].about, found[0].flags, seconds)


def results(works: Sequence[Work], jobs: int, total: int) -> Iterator[tuple[Work, Result]]:
    """Each configuration's result, in their order, under one bar."""
    parts = [segment for work in works for segment in work.segments]
    found = _results(parts, jobs, total)
    for work in works:
        yield work, joined(work, [next(found)[1] for _ in work.segments])


def _results(works: Sequence[Work], jobs: int, total: int) -> Iterator[tuple[Work, Result]]:
    with progress_bar(total, "simulate", unit=" iterations") as bar:
        if min(jobs, len(works)) == 1:
            yield from ((work, attempt(work, lambda: bar.update(1))) for work in works)
            return
        with Processes(min(jobs, len(works)), _attempts, lambda: bar.update(1)) as processes:
            waiting = [processes.submit(work) for work in works]
            yield from ((w, _result(f)) for w, f in zip(works, waiting, strict=True))


def problem(args: argparse.Namespace) -> str:
    """What is wrong with the flags, in words; empty: nothing."""
    unknown = [name for name in args.configurations if name not in CONFIGURATIONS]
    if unknown:
        return f"no configuration is named {unknown[0]}; --list says which there are"
    try:
        span_of(args)
        for size in args.tensor_model_parallel_size:
            setting_of(args, size)
    except (ClusterError, DataError, ProfileError, ValueError, OSError) as error:
        return str(error)
    return ""


def configurations(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Names and sizes; what tries sizes of its own is there once."""
    sizes = list(dict.fromkeys(args.tensor_model_parallel_size))
    return [
        (name, size)
        for name in dict.fromkeys(args.configurations)
        for size in (sizes if name not in OWN_SIZES else [1])
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.list:
        for name in CONFIGURATIONS:
            print(f"{name:20s} {(PLANNED.get(name) or STATIC[name]).about}")
        return 0
    if wrong := problem(args):
        print(f"simulate: {wrong}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.output or Path(scratch)
        works = [Work(name, args, directory, size) for name, size in configurations(args)]
        found = list(results(works, args.jobs, len(works) * args.iterations))
    print(table([row(w.title, r.summary) for w, r in found if not isinstance(r, str)]))
    failed = False
    for work, result in found:
        if isinstance(result, str):
            print(f"simulate: {work.title}: {result}", file=sys.stderr)
            failed = True
        else:
            words = f": {result.about}" if result.about else ""
            print(f"{work.title}, {result.seconds:.1f} s on this machine{words}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    run_tool(main)
