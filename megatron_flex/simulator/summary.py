"""What the records of a simulation come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Summary:
    """Totals of a configuration.

    Attributes:
        seconds, tokens: of all iterations.
        balance: seconds over those of perfect balance.
        switches: changes of layout; ``stalls``: seconds of them.
        memory: most bytes of a device.
        padding: tokens that were computed beside the samples', as a part of all that were.
        bubble: mean part of an iteration.
    """

    iterations: int
    seconds: float
    tokens: int
    balance: float
    switches: int
    stalls: float
    memory: float
    padding: float
    bubble: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Summary:
        """From the lines of iterations, at least one."""

        def total(name: str) -> float:
            return sum(float(r.get(name, 0.0)) for r in records)

        seconds, tokens, padding = total("elapsed"), total("tokens"), total("padding")
        return cls(
            iterations=len(records),
            seconds=seconds,
            tokens=round(tokens),
            balance=seconds / total("seconds-perfect"),
            switches=sum("switch-stall" in r for r in records),
            stalls=total("switch-stall"),
            memory=max(float(r["memory-measured"]) for r in records),
            padding=padding / (tokens + padding),
            bubble=total("bubble") / len(records),
        )


COLUMNS = (
    "configuration", "iterations", "seconds", "tokens/s", "x balance", "bubble", "padding",
    "switches", "stalls s", "memory GB",
)  # fmt: skip


def row(name: str, s: Summary) -> tuple[str, ...]:
    """A line of the table: :data:`COLUMNS`."""
    return (
        name, f"{s.iterations:,}", f"{s.seconds:,.1f}", f"{s.rate:,.0f}", f"{s.balance:.3f}",
        f"{s.bubble:.1%}", f"{s.padding:.1%}", f"{s.switches:,}", f"{s.stalls:.2f}",
        f"{s.memory / 1e9:.1f}",
    )  # fmt: skip


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns under :data:`COLUMNS`."""
    every = [COLUMNS, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            word.ljust(width) if i == 0 else word.rjust(width)
            for i, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in every
    )
