#!/usr/bin/env python3
"""Bubbles on variable-length micro-batches: published schedules against ours, on the same numbers.

    python benchmarks/schedules.py

Six batches of 65,536 tokens each, a 32-layer GPT, 80 GB devices (tests/data/). A bubble is
1 - total work / (devices x makespan), the mean over the batches. "Whole layers" cuts between
layers, "blocks" also between the attention half (a third of a layer's cost) and the MLP half.
The floor is what the cut alone costs: the fullest device against the mean.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import numpy as np

from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.schedule.costs import Floats, OpCosts
from megatron_flex.schedule.list_scheduler import policy, search, simulate

DATA = ROOT / "tests" / "data" / "variable_length_batches.json"
DEVICE_MB = 80 * 1024
ATTENTION_SHARE = 1 / 3
#: Share of the work that the first pass through a V covers, and how many orders are tried on each.
TEMPLATES = (0.4, 0.35)
TRIES = 4


@dataclass(frozen=True)
class Batch:
    """The micro-batches of one global batch: times in ms, sizes in MB, one entry each."""

    devices: int
    layers: int
    layer_forward: tuple[float, ...]
    layer_backward: tuple[float, ...]
    head_forward: tuple[float, ...]
    head_backward: tuple[float, ...]
    layer_activation: tuple[float, ...]
    layer_state: float
    embedding_state: float
    published: dict[str, tuple[float, float]]

    @cached_property
    def work(self) -> float:
        """ms of all forwards and backwards."""
        head = sum(self.head_forward) + sum(self.head_backward)
        return self.layers * self.layer_work + head

    @cached_property
    def layer_work(self) -> float:
        """ms of one layer over all micro-batches."""
        return sum(self.layer_forward) + sum(self.layer_backward)

    def bubble(self, makespan: float) -> float:
        """1 - total work / (devices x makespan)."""
        return 1 - self.work / self.devices / makespan


def load() -> dict[int, list[Batch]]:
    """The batches, by number of devices."""
    found = {}
    for run in json.loads(DATA.read_text(encoding="utf-8"))["runs"]:
        found[int(run["stages"])] = [
            Batch(
                run["stages"],
                run["layers"],
                tuple(batch["layer_forward"]),
                tuple(batch["layer_backward"]),
                tuple(batch["head_forward"]),
                tuple(batch["head_backward"]),
                tuple(batch["layer_activation"]),
                run["layer_state_MB"],
                run["embedding_state_MB"],
                {name: (ms, mb) for name, (ms, mb) in batch["published"].items()},
            )
            for batch in run["batches"]
        ]
    return found


@dataclass(frozen=True)
class Layout:
    """Stages over a batch's layers: units are the embedding, layers or their halves, the head."""

    batch: Batch
    blocks: bool
    groups: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...]

    @cached_property
    def shares(self) -> list[float]:
        """Layers' worth of each unit; the head's own cost comes on top."""
        halves = [ATTENTION_SHARE, 1 - ATTENTION_SHARE] if self.blocks else [1.0]
        return [0.0, *halves * self.batch.layers, 0.0]

    @cached_property
    def plan(self) -> Plan:
        edges = zip(pairwise(self.cuts), self.groups, strict=True)
        return Plan(tuple(Stage(a, b, group) for (a, b), group in edges))

    @cached_property
    def stage_layers(self) -> list[float]:
        return [sum(self.shares[a:b]) for a, b in pairwise(self.cuts)]

    @cached_property
    def costs(self) -> OpCosts:
        b = self.batch
        last = len(self.groups) - 1
        none = [0.0] * len(b.head_forward)

        def table(layer: Sequence[float], head: Sequence[float]) -> Floats:
            found: Floats = np.outer(np.array(self.stage_layers), np.array(layer, float))
            found[last] += head
            return found

        half: Floats = 0.5 * table(b.layer_backward, b.head_backward)
        return OpCosts(
            table(b.layer_forward, b.head_forward), half, half, np.zeros((last, len(none))),
            table(b.layer_activation, none),
        )  # fmt: skip

    @cached_property
    def states(self) -> list[float]:
        """MB of parameters, gradients and optimizer state on each device (tied embeddings)."""
        held = [0.0] * self.batch.devices
        for stage, group in enumerate(self.groups):
            for device in group:
                held[device] += self.stage_layers[stage] * self.batch.layer_state
        for device in {*self.groups[0], *self.groups[-1]}:
            held[device] += self.batch.embedding_state
        return held

    def peak(self, activations: Sequence[float]) -> float:
        """MB of the fullest device."""
        return max(a + s for a, s in zip(activations, self.states, strict=True))


def even(batch: Batch, v: bool) -> Layout:
    """Whole layers in equal numbers, one or (in a V) two stages a device."""
    stages = batch.devices * (2 if v else 1)
    inner = [1 + batch.layers // stages * i for i in range(1, stages)]
    groups = [(min(i, 2 * batch.devices - 1 - i),) for i in range(stages)]
    return Layout(batch, False, tuple(groups), (0, *inner, batch.layers + 2))


def balanced_v(batch: Batch, blocks: bool, degrees: Sequence[int], first_pass: float) -> Layout:
    """The V whose fullest device has least work, its first pass covering ``first_pass`` of all.

    For a given bound, devices are filled in turn: a first stage near its share of the first pass,
    then as long a second stage as the bound allows. The bound is raised until all units fit. (A
    first stage that is almost empty would let the device wait for its second.)
    """
    edges = [sum(degrees[:i]) for i in range(len(degrees) + 1)]
    groups = [tuple(range(a, b)) for a, b in pairwise(edges)]
    layout = Layout(batch, blocks, (*groups, *groups[::-1]), ())
    work = [share * batch.layer_work for share in layout.shares]
    work[-1] = sum(batch.head_forward) + sum(batch.head_backward)
    before = [sum(work[:i]) for i in range(len(work) + 1)]
    mean, unit = before[-1] / edges[-1], max(work[1:-1])
    for slack in (1.0, 1.5, 2.0, 3.0, 4.0):
        for step in range(250):
            cuts = _fill(before, degrees, mean * (1 + step / 500), first_pass, unit * slack)
            if cuts:
                return replace(layout, cuts=cuts)
    raise ValueError(f"no V over {degrees} holds {len(work)} units")


def _fill(
    before: Sequence[float], degrees: Sequence[int], bound: float, first_pass: float, slack: float
) -> tuple[int, ...] | None:
    """Cuts of a V with no device above ``bound``, or ``None``."""
    total, units = before[-1], len(before) - 1
    # Where the first stages may have come to -> the least start of the second ones, and the cuts.
    reached: dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]] = {0: (units, (0,), (units,))}
    for number, degree in enumerate(degrees):
        target = first_pass * total * sum(degrees[: number + 1]) / sum(degrees)
        after: dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        for start, (stop, left, right) in reached.items():
            for cut in range(start + 1, stop):
                first = before[cut] - before[start]
                if first > bound * degree:
                    break
                if abs(before[cut] - target) > slack:
                    continue
                if number == len(degrees) - 1:
                    if before[stop] - before[start] <= bound * degree * (1 + 1e-9):
                        return (*left, cut, *right)
                    continue
                back = stop
                room = 2 * (len(degrees) - 1 - number)
                while (
                    back - 1 - cut >= room
                    and before[back - 1] >= first_pass * total
                    and before[stop] - before[back - 1] + first <= bound * degree * (1 + 1e-9)
                ):
                    back -= 1
                if back < stop and (cut not in after or after[cut][0] > back):
                    after[cut] = (back, (*left, cut), (back, *right))
        reached = after
    return None


@dataclass(frozen=True)
class Row:
    """One line of the table: means over the batches."""

    name: str
    bubble: float
    floor: float
    peak_gb: float
    simulations: int
    seconds: float


def published(batches: Sequence[Batch], name: str) -> Row:
    """A published scheduler's own result."""
    bubbles = [b.bubble(b.published[name][0]) for b in batches]
    peaks = [b.published[name][1] for b in batches]
    return Row(f"{name}, published", _mean(bubbles), float("nan"), _mean(peaks) / 1024, 0, 0.0)


def textbook(batches: Sequence[Batch], name: str) -> Row:
    """A textbook order on evenly cut layers, in our simulator."""
    bubbles, peaks = [], []
    began = time.perf_counter()
    for batch in batches:
        layout = even(batch, v=name == "zb-v")
        placed = simulate(layout.plan, layout.costs, policy(name))
        bubbles.append(batch.bubble(placed.makespan))
        peaks.append(layout.peak(placed.peak))
    seconds = (time.perf_counter() - began) / len(batches)
    return Row(
        f"{name}, even layers", _mean(bubbles), float("nan"), _mean(peaks) / 1024, 1, seconds
    )


def ours(
    batches: Sequence[Batch],
    name: str,
    blocks: bool,
    degrees: Sequence[int] = (),
    within: str = "",
    tries: int = TRIES,
) -> Row:
    """Our search: a few cuts, a few orders of entry; 80 GB or ``within`` a published peak."""
    bubbles, floors, peaks = [], [], []
    seconds, most = 0.0, 0
    for batch in batches:
        limit = batch.published[within][1] if within else DEVICE_MB
        best: tuple[float, float] | None = None
        simulations = 0
        for first_pass in TEMPLATES:
            layout = balanced_v(batch, blocks, degrees or (1,) * batch.devices, first_pass)
            memory = [limit - held for held in layout.states]
            costs = layout.costs
            began = time.perf_counter()
            choice = search(
                layout.plan, costs, memory=memory, tries=tries,
                stop=best[0] if best else float("inf"),
            )  # fmt: skip
            seconds += time.perf_counter() - began
            simulations += choice.tried if choice else tries
            if choice and choice.fits:
                best = (choice.placement.makespan, layout.peak(choice.placement.peak))
        if best is None:
            raise ValueError(f"{name}: nothing fits into {limit:.0f} MB")
        bubbles.append(batch.bubble(best[0]))
        floors.append(_floor(layout))
        peaks.append(best[1])
        most = max(most, simulations)
    return Row(
        name, _mean(bubbles), _mean(floors), _mean(peaks) / 1024, most, seconds / len(batches)
    )


def _floor(layout: Layout) -> float:
    """Bubble that the fullest group alone makes, with micro-batches cut as finely as one likes."""
    load: dict[tuple[int, ...], float] = {}
    costs = layout.costs
    for stage, group in enumerate(layout.groups):
        load[group] = load.get(group, 0.0) + sum(costs.stage_work(stage)) / len(group)
    return layout.batch.bubble(max(load.values()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(devices: int, batches: Sequence[Batch]) -> list[Row]:
    """All rows for one number of devices."""
    rows = [
        published(batches, "DynaPipe (permuted)"),
        textbook(batches, "1f1b"),
        textbook(batches, "zb-h1"),
        textbook(batches, "zb-v"),
        ours(batches, "V, whole layers, 80 GB", blocks=False),
        ours(batches, "V, blocks, 80 GB", blocks=True),
        ours(batches, "V, blocks, ZB-V's peak memory", blocks=True, within="ZB-V"),
    ]
    if devices == 8:
        rows.append(ours(batches, "V, blocks, degrees 2,3,3", blocks=True, degrees=(2, 3, 3)))
    return rows


def main() -> None:
    """Print the table."""
    print(__doc__)
    for devices, batches in load().items():
        print(f"{devices} devices, {len(batches)} batches of {len(batches[0].head_forward)} or so"
              " micro-batches")  # fmt: skip
        print(f"  {'schedule':<34}{'bubble':>8}{'floor':>8}{'peak GB':>9}{'sims':>6}{'ms':>7}")
        for row in table(devices, batches):
            floor = "" if row.floor != row.floor else f"{100 * row.floor:.1f} %"
            milliseconds = f"{1000 * row.seconds:.1f}" if row.simulations else ""
            print(
                f"  {row.name:<34}{100 * row.bubble:>6.1f} %{floor:>8}{row.peak_gb:>9.1f}"
                f"{row.simulations or '':>6}{milliseconds:>7}"
            )
        print()


if __name__ == "__main__":
    main()
