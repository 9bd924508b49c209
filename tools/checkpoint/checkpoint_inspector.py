#!/usr/bin/env python3
"""Say what a checkpoint holds, and whether its files are intact.

    python tools/checkpoint/checkpoint_inspector.py runs/demo/checkpoints
    python tools/checkpoint/checkpoint_inspector.py runs/demo/checkpoints --iteration 20 --tensors
    python tools/checkpoint/checkpoint_inspector.py runs/demo/checkpoints --compare runs/other

Prints the iterations in the directory, the state and the model of one of them, and its tensors by
module. Every file is compared with its checksum unless --no-verify is given. With --compare it
lists the tensors that differ from those of another checkpoint, by their checksums. Exits with 1
when a file is damaged or a tensor differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # from a clone, without installing
    sys.path.insert(0, str(ROOT))

from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.layout import iterations_in, latest, locate
from megatron_flex.checkpoint.load import read_common, verify
from megatron_flex.checkpoint.manifest import MODEL, Manifest, TensorEntry
from megatron_flex.signals import run_tool

_LAYER = re.compile(r"\.layers\.\d+\.")
_OPTIMIZER = re.compile(r"optimizer\.state\.(\w+)\.")


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, help="what was given as --save")
    parser.add_argument("--iteration", "--ckpt-step", type=int, help="instead of the newest")
    parser.add_argument("--tensors", action="store_true", help="list each tensor by itself")
    parser.add_argument("--no-verify", action="store_true", help="do not read the tensors' files")
    parser.add_argument("--compare", type=Path, metavar="DIRECTORY", help="another checkpoint")
    parser.add_argument("--compare-iteration", type=int, help="iteration of the other checkpoint")
    return parser.parse_args(given)


def table(rows: Iterable[Sequence[str]], header: Sequence[str]) -> str:
    """Columns of equal width; those after the first are aligned to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def text(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join(
        [text(header), "-" * (sum(widths) + 2 * len(widths) - 2), *map(text, lines[1:])]
    )


def size_text(size: int) -> str:
    """``1.5 MiB``."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, _ = value / 1024, units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def numel(entry: TensorEntry) -> int:
    """Number of values of a tensor."""
    count = 1
    for extent in entry.shape:
        count *= extent
    return count


def by_module(tensors: Mapping[str, TensorEntry]) -> str:
    """One line a parameter name, with all layers together."""
    groups: dict[tuple[str, ...], list[TensorEntry]] = defaultdict(list)
    for name, entry in tensors.items():
        shape = "x".join(map(str, entry.shape)) or "scalar"
        groups[_LAYER.sub(".layers.*.", name), shape, entry.dtype].append(entry)
    rows = [
        (*key, str(len(entries)), f"{sum(map(numel, entries)):,}",
         size_text(sum(entry.bytes for entry in entries)))
        for key, entries in sorted(groups.items())
    ]  # fmt: skip
    return table(rows, ["tensors", "shape", "dtype", "count", "values", "bytes"])


def one_by_one(tensors: Mapping[str, TensorEntry]) -> str:
    """One line a tensor, with its checksum."""
    rows = [
        (name, "x".join(map(str, entry.shape)) or "scalar", entry.dtype, entry.digest)
        for name, entry in sorted(tensors.items())
    ]
    return table(rows, ["tensor", "shape", "dtype", "checksum (XXH3-128)"])


def by_kind(tensors: Mapping[str, TensorEntry]) -> str:
    """How much of it are weights, and how much is each part of the optimizer's state."""
    groups: dict[str, list[TensorEntry]] = defaultdict(list)
    for name, entry in tensors.items():
        match = _OPTIMIZER.match(name)
        groups[f"optimizer: {match[1]}" if match else "weights"].append(entry)
    rows = [
        (kind, str(len(entries)), f"{sum(map(numel, entries)):,}",
         size_text(sum(entry.bytes for entry in entries)))
        for kind, entries in sorted(groups.items(), reverse=True)
    ]  # fmt: skip
    return table(rows, ["kind", "tensors", "values", "bytes"])


def values(common: Mapping[str, Any]) -> str:
    """Names and values, nested ones with dots."""
    rows: list[tuple[str, str]] = []

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key in sorted(value):
                visit(f"{prefix}.{key}" if prefix else str(key), value[key])
        else:
            rows.append((prefix, str(value)))

    visit("", common)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name.ljust(width, '.')}... {value}" for name, value in rows)


def differences(ours: Mapping[str, TensorEntry], others: Mapping[str, TensorEntry]) -> list[str]:
    """Lines that say which tensors of two checkpoints differ."""
    lines = []
    for name in sorted({*ours, *others}):
        if name not in others or name not in ours:
            lines.append(f"{name}: only in the {'first' if name in ours else 'second'}")
        elif ours[name] != others[name]:
            a, b = ours[name], others[name]
            form = [f"{e.dtype}{list(e.shape)}" for e in (a, b)]
            lines.append(f"{name}: " + ("values" if form[0] == form[1] else " against ".join(form)))
    return lines


def newest(directory: Path) -> str:
    """The iteration that a run would go on from, or why there is none."""
    try:
        return str(latest(directory))
    except CheckpointError as error:
        return f"none: {error}"


def inspect(options: argparse.Namespace) -> int:
    """Print the report; the exit status."""
    path = locate(options.directory, options.iteration)
    manifest = Manifest.read(path)
    common = read_common(options.directory, options.iteration)
    print(f"directory:  {options.directory}")
    print(f"iterations: {', '.join(map(str, iterations_in(options.directory)))}")
    print(f"newest:     {newest(options.directory)}")
    print(f"shown here: {path}")
    print(f"files:      {len(manifest.files)} of"
          f" {size_text(sum(entry.bytes for entry in manifest.files.values()))}")  # fmt: skip
    model = common.pop(MODEL, {})
    print(f"\nModel\n{values(model)}\n\nState\n{values(common)}\n")
    print(by_kind(manifest.tensors), end="\n\n")
    print((one_by_one if options.tensors else by_module)(manifest.tensors), end="\n\n")
    if not options.no_verify:
        verify(options.directory, options.iteration)
        print("all files match their checksums")
    if options.compare is None:
        return 0
    other = Manifest.read(locate(options.compare, options.compare_iteration))
    lines = differences(manifest.tensors, other.tensors)
    print(f"\n{len(lines)} of {len({*manifest.tensors, *other.tensors})} tensors differ from"
          f" iteration {other.iteration} of {options.compare}")  # fmt: skip
    print("".join(f"  {line}\n" for line in lines), end="")
    return 1 if lines else 0


def main(given: Sequence[str] | None = None) -> int:
    """Run the command."""
    try:
        return inspect(parse_arguments(given))
    except CheckpointError as error:
        print(f"checkpoint_inspector: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    run_tool(main)
