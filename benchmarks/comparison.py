"""What was measured of rows that took turns, as tables, and what follows from them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

TABLES = {"real": "real lengths", "equal": "equal lengths, no padding"}
SAME = 1e-4
"""Relative difference of losses of rows that train the same model on the same batch."""


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        data: real or equal lengths.
        flags: how batches are cut.
        choices: micro-batches to try.
        plans: one for each batch, where they differ.
    """

    name: str
    data: str
    kind: str
    plan: str
    flags: str = "--flexpipe-slice-tokens 0"
    choices: tuple[int, ...] = (0,)
    plans: tuple[str, ...] = ()

    def plan_for(self, batch: int) -> str:
        """The plan that a batch runs on."""
        return self.plans[batch % len(self.plans)] if self.plans else self.plan

    @property
    def shown(self) -> str:
        """The plan, or how many there are."""
        if not self.plans:
            return f"{self.plan} {self.flags.partition('--flexpipe-batching ')[2]}".rstrip()
        layouts = dict.fromkeys(p.partition(" ;")[0] for p in self.plans)
        each = " and ".join(layouts)
        return each if len(layouts) < 3 else f"{len(layouts)} plans for {len(self.plans)} batches"


@dataclass(frozen=True)
class Turn:
    """One iteration of a row. ``work``: CPU seconds of both workers."""

    row: int
    batch: int
    seconds: float
    work: float
    simulated: float
    tokens: int
    loss: float


@dataclass(frozen=True)
class Found:
    """Each row's choice, the first two iterations of each with its first choice, and the turns."""

    choices: list[int]
    firsts: list[Turn]
    turns: list[Turn]

    @classmethod
    def of(cls, data: dict[str, Any]) -> Found:
        """Read from JSON."""
        firsts, turns = ([Turn(**turn) for turn in data[name]] for name in ("firsts", "turns"))
        return cls(data["choices"], firsts, turns)


@dataclass(frozen=True)
class Table:
    """The rows of one kind of lengths."""

    rows: list[Row]
    turns: dict[str, list[Turn]]
    choices: dict[str, int]

    @classmethod
    def of(cls, rows: Sequence[Row], found: Found, data: str) -> Table:
        """Some of all rows."""
        numbers = [n for n, row in enumerate(rows) if row.data == data]
        turns = {rows[n].name: [t for t in found.turns if t.row == n] for n in numbers}
        choices = {rows[n].name: found.choices[n] for n in numbers}
        return cls([rows[n] for n in numbers], turns, choices)

    def ratios(self, name: str, base: str) -> list[float]:
        """How many times as fast as ``base`` a row was, turn by turn."""
        pairs = zip(self.turns[name], self.turns[base], strict=True)
        return [b.seconds / a.seconds for a, b in pairs]

    def at_best(self, name: str, base: str) -> float:
        """The same of each batch's fastest iterations, which other load disturbs least."""
        return self._least(base) / self._least(name)

    def _least(self, name: str) -> float:
        turns = self.turns[name]
        batches = {t.batch for t in turns}
        return sum(min(t.seconds for t in turns if t.batch == batch) for batch in batches)

    def simulated(self, name: str, base: str) -> float:
        """The same, by simulation; the median."""
        pairs = zip(self.turns[name], self.turns[base], strict=True)
        return median(b.simulated / a.simulated for a, b in pairs)

    def fastest(self, kind: str) -> str:
        """The fastest row of a kind; empty where there is none."""
        names = [row.name for row in self.rows if row.kind == kind]
        return max(names, key=lambda name: median(self.ratios(name, "1f1b")), default="")

    def print(self) -> None:
        """All rows."""
        print(f"{'':17}{'tokens/s':>9}{'quartiles':>11}{'of 1f1b':>9}{'quartiles':>11}"
              f"{'at best':>9}{'simulated':>11}{'CPU ms':>8}  plan")  # fmt: skip
        for row in self.rows:
            turns = self.turns[row.name]
            low, rate, high = quantiles((t.tokens / t.seconds for t in turns), n=4)
            below, ratio, above = quantiles(self.ratios(row.name, "1f1b"), n=4)
            ours = row.kind == "ours"
            told = f"{self.simulated(row.name, '1f1b'):.3f}" if ours else ""
            layout, choice = row.plan.partition(" ;")[0], self.choices[row.name]
            plan = {
                "ours": row.shown,
                "pipelined": f"{layout}, {choice} micro-batches",
                "replicated": f"{layout}, micro-batches of {choice} padded tokens",
            }[row.kind]
            print(
                f"{row.name:17}{rate:9.0f}{f'{low:.0f}-{high:.0f}':>11}{ratio:9.3f}"
                f"{f'{below:.2f}-{above:.2f}':>11}"
                f"{self.at_best(row.name, '1f1b'):9.3f}{told:>11}"
                f"{1e3 * median(t.work for t in turns):8.0f}  {plan}"
            )


def report(rows: Sequence[Row], found: Found) -> None:
    """Print the tables, and what follows from them.

    Exits where rows do not train the same: their losses before and after the first update differ.
    """
    tables = {data: Table.of(rows, found, data) for data in dict.fromkeys(r.data for r in rows)}
    for data, table in tables.items():
        print(f"\n{TABLES[data]}")
        table.print()
        firsts = [turn.loss for turn in found.firsts if rows[turn.row].data == data]
        for losses in (firsts[::2], firsts[1::2]):
            if max(losses) - min(losses) > SAME * max(losses):
                each = dict(zip(table.turns, losses, strict=True))
                sys.exit(f"the rows do not train the same: {each}")
        print(f"losses of the first two iterations, in all rows: {firsts[0]:.4f}, {firsts[1]:.4f}")
    print()
    for data, table in tables.items():
        measured, told = median(table.ratios("zb-v", "1f1b")), table.simulated("zb-v", "1f1b")
        points = 100 * (measured - told)
        print(
            f"{data} lengths: zb-v is {measured:.3f} times as fast as 1f1b"
            f" (at best {table.at_best('zb-v', '1f1b'):.3f}), by simulation {told:.3f}:"
            f" {points:+.1f} points, {'within' if abs(points) <= 3 else 'beyond'} 3"
        )
    for data, table in tables.items():
        for theirs in filter(None, map(table.fastest, ("pipelined", "replicated"))):
            for ours in sorted({"zb-v", table.fastest("ours")}):
                ratio, best = median(table.ratios(ours, theirs)), table.at_best(ours, theirs)
                print(f"{data} lengths: {ours} is {ratio:.3f} times as fast as {theirs}"
                      f" (at best {best:.3f})")  # fmt: skip
