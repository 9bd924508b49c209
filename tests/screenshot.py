"""Makes the picture of a page in docs.

    python -m tests.screenshot runs/demo/report.html docs/report.png

Needs Chromium. Of the page what says most is shown; colours are reduced to a palette.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from PIL import Image

from tests.browser import Browser

SHOWN = ("lengths", "plans", "time", "iteration")
LARGEST = 200_000  # bytes


def main() -> None:
    """Take the picture that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--iteration", type=int, help="that is drawn; default the last drawn one")
    parser.add_argument("--width", type=int, default=1000)
    args = parser.parse_args()
    with Browser() as browser:
        page = browser.page(width=args.width, height=800)
        page.open(args.page, "document.documentElement?.dataset.ready === 'yes'")
        page.run(
            f"document.querySelectorAll('section, footer, .bar, .totals .facts').forEach((e) =>"
            f" {{ e.hidden = !{list(SHOWN)}.includes(e.dataset.chart || e.id); }})"
        )
        wanted = args.iteration or "Object.keys(shown().gantts).map(Number).pop()"
        page.run(f"select({wanted})")
        page.wait("window.gantt.found && document.querySelector('canvas[data-course]')")
        page.frame()
        data = io.BytesIO(page.picture())
    image = Image.open(data).convert("RGB")
    image = image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(args.picture, optimize=True)
    size = args.picture.stat().st_size
    print(f"{args.picture}: {image.width} x {image.height}, {size / 1000:.0f} kB")
    if size > LARGEST:
        raise SystemExit(f"that is more than {LARGEST / 1000:.0f} kB: give a smaller --width")


if __name__ == "__main__":
    main()
