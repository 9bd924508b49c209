"""Writes docs/flags.md from the parser; ``--check`` only says whether it is up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_flex.config.config import GROUPS, all_options
from megatron_flex.config.option import Option, options
from megatron_flex.config.refused import FLAGS, VALUES

PAGE = ROOT / "docs" / "flags.md"

INTRODUCTION = """# Flags

For those who look a flag up. Written by `tools/flags.py` from the parser; do not edit.

Flags have the names, the meaning and the defaults of Megatron-LM 0.16, with the exceptions below.
They are given in full (no abbreviations). A flag that is unknown, that contradicts another, or that
would have no effect is an error before anything is allocated.

Differences from Megatron-LM:

- `--calculate-per-token-loss` is always on: the loss is a mean over all loss tokens of the global
  batch, so that it does not depend on how the batch is divided.
- `--transformer-impl` is `local` and `--ckpt-format` is `torch_dcp` by default; Megatron-LM's
  defaults are among the values that are refused.
- `--save` alone saves every 500 iterations and at the end; in Megatron-LM `--save-interval` has no
  default.
- A validation that was due after the last iteration is not repeated at the end.
- The log line on the screen is short; `--log-file` gets Megatron-LM's, and with
  `--log-format megatron` the screen does.
- `--micro-batch-tokens` can take the place of `--micro-batch-size`, and then `--global-batch-size`
  has to be given. A global batch need not be a multiple of anything.
- `--max-position-embeddings` may be left out, and `--seq-length` is the length of the longest
  sample: shorter samples are not padded or joined.
- `--num-layers` need not be a multiple of `--pipeline-model-parallel-size`: stages are cut by cost.
- Flags marked with * do not exist in Megatron-LM.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, group in GROUPS.items():
        about = " ".join((group.__doc__ or "").split())
        parts.append(f"## {name.replace('_', ' ').capitalize()}\n\n{about}\n")
        parts.append(_table(("Flag", "Default", "Meaning"), map(_row, options(group))))
    parts.append("## Refused\n\nFlags of Megatron-LM that are an error.\n")
    rows = (
        (", ".join(f"`{flag}`" for flag in r.flags), _sentence(r.reason), _sentence(r.instead))
        for r in FLAGS
    )
    parts.append(_table(("Flags", "Reason", "Instead"), rows))
    parts.append("Values that are an error:\n")
    accepted = {o.flag: o for o in all_options()}
    values = (
        (f"`{flag}`", f"`{value}`" if value else _others(accepted[flag]), _sentence(reason))
        for flag, reasons in VALUES.items()
        for value, reason in reasons.items()
    )
    parts.append(_table(("Flag", "Value", "Reason"), values))
    return "\n".join(parts)


def _others(option: Option) -> str:
    return f"all but `{'`, `'.join(map(str, option.choices))}`"


def _row(option: Option) -> tuple[str, str, str]:
    takes = f" {option.takes}" if option.takes else ""
    name = f"`{option.flag}{takes}`" + ("*" if option.extra.own else "")
    more = f" Also `{'`, `'.join(option.flags[1:])}`." if option.flags[1:] else ""
    return name, option.default_text, option.help + more


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join(f"| {line} |" for line in cells) + "\n"


def main() -> int:
    """Exit status 1 if ``--check`` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    if not parser.parse_args().check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE} is out of date: run python tools/flags.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
