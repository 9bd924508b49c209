"""``megatron-flex COMMAND``: the programs of the source tree's top level and of ``tools/``.

A wheel has the tools as files beside the package (``megatron_flex_tools/``), since they are
programs, not modules. Each is run as ``python tools/NAME.py`` would.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_flex import __version__
from megatron_flex.entry import pretrain_main
from megatron_flex.signals import run_tool

PACKAGE = Path(__file__).resolve().parent
INSTALLED = "megatron_flex_tools"
"""Name of the tools' folder in a wheel."""

OF_THE_TREE = ("flags", "gpu")
"""Tools that work on a source tree."""

PRETRAIN = {
    "pretrain-gpt": "Pre-train or fine-tune a GPT.",
    "pretrain-bert": "Pre-train a BERT.",
}


def tools_directory() -> Path:
    """Where the tools lie: of this installation, else of this source tree."""
    installed = PACKAGE.parent / INSTALLED
    return installed if installed.is_dir() else PACKAGE.parent / "tools"


def tools() -> dict[str, Path]:
    """The file of each tool by its command's name."""
    directory = tools_directory()
    found = sorted(directory.glob("*.py"))
    found += [
        directory / "checkpoint" / f"{name}.py" for name in ("checkpoint_inspector", "convert")
    ]
    return {
        path.stem.replace("_", "-"): path
        for path in found
        if path.is_file() and path.stem not in (*OF_THE_TREE, "__init__")
    }


def usage() -> str:
    """What there is, a line a command."""
    lines = PRETRAIN | {name: _summary(path) for name, path in tools().items()}
    width = max(map(len, lines))
    return "\n".join(
        [
            "usage: megatron-flex COMMAND [FLAGS]",
            "       torchrun ... -m megatron_flex COMMAND [FLAGS]",
            "",
            *(f"  {name:<{width}}  {summary}" for name, summary in lines.items()),
            "",
            "megatron-flex COMMAND --help says more of each.",
        ]
    )


def _summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    return text.partition("\n\n")[0].replace("\n", " ")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command that ``argv`` (default: the process's) begins with, and end the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        sys.exit(0 if words else 2)
    if words[0] == "--version":
        print(f"megatron-flex {__version__}")
        sys.exit(0)
    name = words[0]
    sys.argv = [f"megatron-flex {name}", *words[1:]]
    if name == "pretrain-gpt":
        pretrain_main("gpt")
    if name == "pretrain-bert":
        pretrain_main("bert")
    path = tools().get(name)
    if path is None:
        sys.exit(
            f"error: there is no command {name!r}; there are {', '.join([*PRETRAIN, *tools()])}"
        )

    def tool() -> int:
        runpy.run_path(str(path), run_name="__main__")
        return 0

    run_tool(tool)
