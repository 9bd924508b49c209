"""Settings of the paper's figures, simulated by tools/simulate.py, and its numbers beside them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.planner.presets import PAPER_DEVICES
from megatron_flex.simulator.summary import Summary
from tools.simulate import Work, parser, results

FIGURES: dict[str, Any] = json.loads((Path(__file__).parent / "figures.json").read_text())
SAMPLES, LONGEST = 32, 2048
"""Of figure 9's batch of 32 and figure 8's length of 2,048, where both have the same values."""
PAPER_NAMES = {
    "flexpipe": "FlexPipe",
    "dynapipe": "DynaPipe",
    "packed-1f1b": "FlashAttention-packing",
    "zero-bubble-pad": "ZeroBubble-padding",
}
MODELS = {"bert-24": "BERT24", "bert-96": "BERT96", "gpt-3.35b": "GPT-3.35B", "gpt-13b": "GPT-13B"}
"""Our names and the paper's."""


@dataclass(frozen=True)
class Place:
    """One setting; ``share``: of long samples around ``median`` tokens."""

    model: str
    devices: int
    samples: int
    longest: int
    share: float = 0.0
    median: int = 16000

    @property
    def gpt(self) -> bool:
        """Whether samples can be cut to slices."""
        return self.model.startswith("gpt")

    @property
    def slug(self) -> str:
        """For a directory."""
        long = f"-long{self.share:g}" if self.share else ""
        return f"{self.model}-x{self.devices}-b{self.samples}-n{self.longest}{long}"

    def words(self, iterations: int, more: Sequence[str] = ()) -> list[str]:
        """As flags of tools/simulate.py."""
        return [
            "--model", self.model, "--cluster", f"a100x{self.devices}",
            "--global-batch-size", str(self.samples), "--seq-length", str(self.longest),
            "--long-share", str(self.share), "--long-median", str(self.median),
            "--iterations", str(iterations), *more,
        ]  # fmt: skip

    def __str__(self) -> str:
        kind = f"long p = {self.share:g}" if self.share else f"up to {self.longest:,}"
        return f"{MODELS[self.model]} × {self.devices}, {self.samples}, {kind}"


def figure8(models: Iterable[str]) -> list[Place]:
    """Maximum lengths from 512 to 8,192."""
    lengths = FIGURES["figure8_throughput_vs_max_length"]["values"]
    return [Place(m, PAPER_DEVICES[m], SAMPLES, n) for m in models for n in lengths]


def figure9(models: Iterable[str]) -> list[Place]:
    """Global batches from 4 to 64."""
    sizes = FIGURES["figure9_throughput_vs_global_batch"]["values"]
    return [Place(m, PAPER_DEVICES[m], n, LONGEST) for m in models for n in sizes]


LONG = [
    Place("gpt-13b", 16, 32, 65536, 0.05),
    Place("gpt-13b", 16, 32, 65536, 0.2),
    Place("gpt-13b", 32, 128, 65536, 0.2),
    Place("gpt-3.35b", 8, 64, 65536, 0.2),
    Place("gpt-3.35b", 4, 32, 65536, 0.2),
]
"""Mixtures with a share of long samples (benchmarks/gain.py, rows 7 to 11)."""

Found = dict[Place, dict[str, Summary]]


def simulated(
    places: Sequence[Place],
    names: Sequence[str],
    iterations: int,
    jobs: int,
    output: Path,
    more: Sequence[str] = (),
) -> Found:
    """The summary of every configuration at every place; what cannot be is said and left out.

    Files that are there already are gone on with.
    """
    places = list(dict.fromkeys(places))
    works, places_of = [], []
    for place in places:
        arguments = parser().parse_args(place.words(iterations, more))
        for name in names:
            works.append(Work(name, arguments, output / place.slug))
            places_of.append(place)
    found: Found = {place: {} for place in places}
    for place, (work, result) in zip(
        places_of, results(works, jobs, len(works) * iterations), strict=True
    ):
        if isinstance(result, str):
            print(f"{place}, {work.name}: {result}", file=sys.stderr)
        else:
            found[place][work.name] = result.summary
    return found


def of_paper(name: str, place: Place) -> float | None:
    """The paper's tokens a second, if it has this setting."""
    column = PAPER_NAMES.get(name)
    if column is None or place.share or PAPER_DEVICES[place.model] != place.devices:
        return None
    for figure, at, other in (
        ("figure8_throughput_vs_max_length", place.longest, place.samples == SAMPLES),
        ("figure9_throughput_vs_global_batch", place.samples, place.longest == LONGEST),
    ):
        data = FIGURES[figure]
        if other and at in data["values"]:
            rows = data["models"][MODELS[place.model]]
            return float(rows[column][data["values"].index(at)])
    return None
