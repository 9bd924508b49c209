#!/usr/bin/env python3
"""Write one page of HTML on a run, or on several side by side.

    python tools/report.py runs/demo
    python tools/report.py runs/demo runs/other --output both.html
    python tools/report.py runs/demo/log.jsonl --iterations 12 40

A run is the directory that its files lie in, or its --log-jsonl file; of a directory of
tools/simulate.py each configuration is one. Beside that the files of
--flexpipe-trace (what each worker did when) and --flexpipe-record are used, where they are in the
same directory. The page opens from the disk, without a network.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.data.bar import shown
from megatron_flex.report.page import GANTTS, page
from megatron_flex.report.read import ReportError, RunData, read_run, runs_in
from megatron_flex.signals import run_tool
from megatron_flex.telemetry.files import replace


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of the tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--output", type=Path, help="default: report.html beside the first run")
    parser.add_argument("--names", nargs="+", help="what to call the runs; default: by their paths")
    parser.add_argument(
        "--iterations", type=int, nargs="+", default=[], metavar="N",
        help="iterations that are drawn operation by operation in any case",
    )  # fmt: skip
    parser.add_argument(
        "--gantts", type=int, default=GANTTS, metavar="N",
        help="how many others are, at most, of each run; the default, %(default)s, takes seconds",
    )  # fmt: skip
    args = parser.parse_args(given)
    if args.gantts < 0:
        parser.error("--gantts must be at least 0")
    return args


def read_runs(paths: Sequence[Path], names: Sequence[str] | None) -> list[RunData]:
    """The runs, each with a name of its own."""
    paths = [run for path in paths for run in runs_in(path)]
    if names and len(names) != len(paths):
        raise ReportError(f"there are {len(names)} --names for {len(paths)} runs: give one each")
    found = []
    for number, path in enumerate(paths):

        def progress(lines: Sequence[bytes]) -> Iterator[bytes]:
            return shown(lines, "read", unit=" lines")

        found.append(read_run([path], names[number] if names else "", progress))
    known = [run.name for run in found]  # runs of one name get that of their path
    return [
        dataclasses.replace(run, name=str(path)) if known.count(run.name) > 1 else run
        for run, path in zip(found, paths, strict=True)
    ]


def main(given: Sequence[str] | None = None) -> int:
    """Write the page; the exit status."""
    args = parse_arguments(given)
    began = time.perf_counter()

    def progress(positions: Sequence[int]) -> Iterator[int]:
        return shown(positions, "make figures", unit=" iterations")

    try:
        runs = read_runs(args.runs, args.names)
        text = page(runs, wanted=args.iterations, gantts=args.gantts, progress=progress).encode(
            errors="replace"  # half a pair of surrogates, which no file can have
        )
        first = args.runs[0]
        output = args.output or (first if first.is_dir() else first.parent) / "report.html"
        output.parent.mkdir(parents=True, exist_ok=True)
        replace(output, [text])
    except (OSError, ReportError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    size = len(text) / 1e6
    print(f"{output} ({size:.1f} MB, {time.perf_counter() - began:.1f} s)")
    return 0


if __name__ == "__main__":
    run_tool(main)
