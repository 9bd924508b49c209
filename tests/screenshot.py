"""Makes the pictures of pages in docs, and the pages that are missing.

    python -m tests.screenshot                  all of them
    python -m tests.screenshot phone month      some
    python -m tests.screenshot --page runs/mine/report.html --picture mine.png

Needs Chromium. Of a page what says most is shown; colours are reduced to a palette. A page that is
there already is taken as it is: remove it for a new one (the demo takes minutes, the month two, the
large cluster some ten).
"""

from __future__ import annotations

import argparse
import io
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from tests.browser import Browser

LARGEST = 200_000  # bytes
READY = "document.documentElement?.dataset.ready === 'yes'"
MADE = {
    "runs/demo/report.html": ("make demo",),
    "runs/month/report.html": (
        "python tools/simulate.py --configurations flexpipe-untuned --model gpt-13b"
        " --cluster a100x32 --global-batch-size 64 --seq-length 8192 --iterations 10000"
        " --simulations 2 --search-every 10000 --segments 2 --jobs 2 --output runs/month",
        "python tools/report.py runs/month",
    ),
    "runs/large/report.html": (
        "python tools/whatif.py --model gpt-128 --cluster h200x4096 --global-batch-size 16384"
        " --seq-length 8192 --iterations 4 --tuning-batches 1 --simulations 12 --jobs 2"
        " --output runs/large --configurations flexpipe static-slices packed-1f1b"
        " packed-zero-bubble no-slices",
    ),
}
"""Commands that make a page."""


@dataclass(frozen=True)
class Picture:
    """What of a page is shown, how wide, and in which colours.

    ``iteration``: that is drawn; 0: the last one.
    """

    page: str
    shown: tuple[str, ...]
    width: int = 1000
    dark: bool = False
    iteration: int = 0


PICTURES = {
    "report": Picture("runs/demo/report.html", ("lengths", "plans", "time", "iteration")),
    "phone": Picture("runs/demo/report.html", ("plans", "memory", "switches"), 400, dark=True),
    "month": Picture("runs/month/report.html", ("overview", "rate", "lengths", "time")),
    "whatif": Picture("runs/large/report.html", ("overview", "time")),
}
"""By name; docs has ``report.png`` and ``report_NAME.png``."""


def take(browser: Browser, picture: Picture, path: Path) -> None:
    """Take a picture; ends the program where it is larger than docs should have."""
    page = browser.page(width=picture.width, height=800, dark=picture.dark)
    page.open(Path(picture.page), READY)
    page.run(
        "document.querySelectorAll('section, footer, .bar, .totals .facts').forEach((e) => {"
        f" e.hidden = !{list(picture.shown)}.includes("
        "e.dataset.chart || e.id || e.querySelector('[id]')?.id); })"
    )
    if "iteration" in picture.shown:
        wanted = picture.iteration or "Object.keys(shown().gantts).map(Number).pop()"
        page.run(f"select({wanted})")
        page.wait("window.gantt.found && document.querySelector('canvas[data-course]')")
    page.frame()
    image = Image.open(io.BytesIO(page.picture())).convert("RGB")
    image = image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path}: {image.width} x {image.height}, {size / 1000:.0f} kB", flush=True)
    if size > LARGEST:
        raise SystemExit(f"that is more than {LARGEST / 1000:.0f} kB: make it narrower")


def make(page: str) -> None:
    """Make a page of :data:`MADE` that is not there."""
    if Path(page).exists():
        return
    for command in MADE[page]:
        print(command, flush=True)
        words = shlex.split(command)
        subprocess.run([sys.executable, *words[1:]] if words[0] == "python" else words, check=True)


def main() -> None:
    """Take the pictures that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}")
    parser.add_argument("--page", help="another page, shown as that of the demo")
    parser.add_argument("--picture", type=Path, help="where its picture goes")
    parser.add_argument("--iteration", type=int, default=0, help="that is drawn")
    parser.add_argument("--width", type=int, default=1000)
    args = parser.parse_args()
    if unknown := set(args.names) - set(PICTURES):
        parser.error(f"no picture is named {', '.join(sorted(unknown))}")
    if (args.page is None) != (args.picture is None):
        parser.error("--page and --picture go together")
    with Browser() as browser:
        if args.page:
            own = replace(PICTURES["report"], page=args.page, width=args.width)
            take(browser, replace(own, iteration=args.iteration), args.picture)
            return
        for name in args.names or PICTURES:
            make(PICTURES[name].page)
            path = Path("docs", "report.png" if name == "report" else f"report_{name}.png")
            take(browser, PICTURES[name], path)


if __name__ == "__main__":
    main()
