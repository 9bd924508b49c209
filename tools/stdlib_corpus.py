#!/usr/bin/env python3
"""Write the embedded data set: the functions and classes of Python's own standard library.

One JSON line for each top-level function or class, in the order of the files' names; tests are
left out. The text is the source as it stands, decorators included. The output depends only on the
Python that runs this.

    python tools/stdlib_corpus.py --output corpus.jsonl
    python tools/stdlib_corpus.py --format pair --output pairs.jsonl

With ``--format pair`` a line has ``prompt`` (decorators, signature, docstring) and ``completion``
(the rest of the body); definitions with nothing after their docstring are left out.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_flex.data.bar import shown
from megatron_flex.signals import run_tool
from megatron_flex.telemetry.files import replace

SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Definition:
    """One function or class: ``head`` is decorators, signature and docstring, ``body`` the rest.

    ``head + body`` is the whole source.
    """

    name: str
    head: str
    body: str


def source_files(root: Path) -> Iterator[Path]:
    """All ``.py`` files below ``root`` in sorted order, without tests and installed packages."""
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in SKIPPED_DIRECTORIES)
        for file in sorted(files):
            if file.endswith(".py"):
                yield Path(directory, file)


def definitions(source: str) -> Iterator[Definition]:
    """The top-level functions and classes of a module, in order.

    Raises:
        SyntaxError: the source is not Python of this version.
        ValueError: it has null bytes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escape sequences in old modules
        tree = ast.parse(source)
    # The syntax tree counts UTF-8 bytes, and lines as the tokenizer does: a form feed ends none.
    lines = [line + b"\n" for line in source.encode().split(b"\n")]
    for node in tree.body:
        if isinstance(node, DEFINITIONS):
            assert node.end_lineno is not None
            whole = lines[_first_line(node) - 1 : node.end_lineno]
            line, column = _end_of_head(node, lines)
            line -= _first_line(node)
            head = b"".join(whole[:line]) + b"".join(whole[line : line + 1])[:column]
            yield Definition(node.name, head.decode(), b"".join(whole)[len(head) :].decode())


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _end_of_head(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[bytes]
) -> tuple[int, int]:
    """Line (from 1) and column (from 0, bytes) where signature and docstring end."""
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        assert first.end_lineno is not None
        return first.end_lineno + 1, 0
    line = _first_line(first)
    before = lines[line - 1][: first.col_offset]
    if before.strip() and line == first.lineno:  # the body is on the line of the signature
        return line, first.col_offset
    while not lines[line - 2].strip() or lines[line - 2].lstrip().startswith(b"#"):
        line -= 1  # a comment above the first statement belongs to the body
    return line, 0


def records(root: Path, form: str) -> Iterator[dict[str, str]]:
    """One JSON object a definition below ``root``; files that cannot be parsed are left out."""
    paths = list(source_files(root))
    for path in shown(paths, "parse", unit=" files"):
        try:
            with tokenize.open(path) as stream:
                found = list(definitions(stream.read()))
        except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
            continue  # such as templates and sources of Python 2
        for definition in found:
            origin = f"{path.relative_to(root).as_posix()}:{definition.name}"
            if form == "text":
                yield {"text": definition.head + definition.body, "origin": origin}
            elif definition.body.strip():
                yield {
                    "prompt": definition.head,
                    "completion": definition.body,
                    "origin": origin,
                }


def main(words: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--format", choices=("text", "pair"), default="text")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="directory of Python sources (default: the standard library of this Python)",
    )
    arguments = parser.parse_args(words)
    lines = [
        (json.dumps(record, ensure_ascii=False) + "\n").encode()
        for record in records(arguments.root, arguments.format)
    ]
    if not lines:
        print(f"stdlib_corpus: no Python source below {arguments.root}", file=sys.stderr)
        return 1
    try:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        replace(arguments.output, lines)
    except OSError as error:
        print(f"stdlib_corpus: {error}", file=sys.stderr)
        return 1
    print(f"{len(lines)} definitions from {arguments.root} written to {arguments.output}")
    return 0


if __name__ == "__main__":
    run_tool(main)
