#!/usr/bin/env python3
"""Watch a run in the terminal: what it is at, its plan, where its time goes, the last switch.

    python tools/status.py runs/demo
    python tools/status.py runs/demo/log.jsonl --once

RUN is the file of --log-jsonl, or the directory that it lies in. The view is drawn anew whenever an
iteration has come; Ctrl-C ends it, and not the run.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.report.read import ReportError, log_of
from megatron_flex.report.status import Tail, status


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of the tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--once", action="store_true", help="print the lines and end")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS",
                        help="between looks at the file")  # fmt: skip
    args = parser.parse_args(given)
    if args.interval <= 0:
        parser.error("--interval must be above 0")
    return args


def fitted(lines: Sequence[str], width: int, height: int) -> list[str]:
    """Lines that a terminal of this size shows whole."""
    cut = [line if len(line) <= width else f"{line[: width - 3]}..." for line in lines]
    return cut[: max(1, height - 1)]


def main(given: Sequence[str] | None = None) -> int:
    """Show the status; the exit status."""
    args = parse_arguments(given)
    try:
        tail = Tail(log_of([args.run]))
        tail.update()
        if args.once or not sys.stdout.isatty():
            print("\n".join(status(tail)))
            return 0
        # It ends no other way, also where the shell that started it ignores Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        while True:
            size = shutil.get_terminal_size()
            shown = "\n".join(fitted(status(tail), size.columns, size.lines))
            print(f"\033[H\033[2J{shown}", flush=True)
            for _ in range(10):  # how long ago it was goes on, also where nothing comes
                time.sleep(args.interval)
                if tail.update():
                    break
    except (OSError, ReportError) as error:
        print(f"status: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
