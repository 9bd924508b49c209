"""What the record of an iteration says of its layout, its memory and the switch before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_flex.config.flexpipe import FlexpipeOptions
from megatron_flex.loop.measures import MemoryMeasure, StallMeter, bubble, times_of
from megatron_flex.loop.plans import Choice
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.clock import Measured


@dataclass(frozen=True)
class Layout:
    """Numbers and log fields of an iteration, and why its layout is not the one before."""

    extra: dict[str, float]
    notes: dict[str, str]
    reason: str


class Layouts:
    """The layouts of a run, iteration by iteration."""

    def __init__(self, options: FlexpipeOptions) -> None:
        self._changing = options.plans_change
        self._stalls = StallMeter()
        self._memory = MemoryMeasure(options.memory_budget)
        self._switched = False

    def add(
        self, choice: Choice, measured: Sequence[Measured], seconds: float, following: Plan
    ) -> Layout:
        """An iteration on the plan of ``choice`` that took ``seconds``.

        Args:
            choice: the plan, and what was known of it before.
            measured: by each device.
            seconds: of wall clock.
            following: the plan at its end.
        """
        extra = {"bubble": bubble(measured), **times_of(measured), **self._memory.add(measured)}
        notes: dict[str, str] = {}
        if self._memory.over:
            notes["iterations over the memory budget"] = str(self._memory.over)
        reason = choice.reason if self._switched else ""
        stall = self._stalls.add(measured, switched=self._switched)
        self._switched = following.stages != choice.plan.stages
        if self._changing:
            self._compare(choice, seconds, stall, extra, notes)
        return Layout(extra, notes, reason)

    def _compare(
        self,
        choice: Choice,
        seconds: float,
        stall: float | None,
        extra: dict[str, float],
        notes: dict[str, str],
    ) -> None:
        """Add what is worth knowing only where plans change."""
        notes["plan"] = choice.plan.shape
        if choice.action:
            notes["action"] = choice.action
        if choice.simulations is not None:
            extra["simulations"] = choice.simulations
        if stall is not None:
            extra["switch-stall"] = stall
            notes["switch stall (ms)"] = f"{1000 * stall:.1f}"
        notes["bubble"] = f"{100 * extra['bubble']:.1f}%"
        if choice.seconds is not None:
            extra["predicted"] = choice.seconds
            if choice.uncorrected is not None:
                extra["predicted-uncorrected"] = choice.uncorrected
            if choice.whole is not None:
                extra["predicted-without-slices"] = choice.whole
            notes["predicted/measured (ms)"] = f"{1000 * choice.seconds:.1f}/{1000 * seconds:.1f}"
        if "memory-measured" in extra:
            sizes = (extra["memory-predicted"], extra["memory-measured"])
            notes["memory predicted/measured (MB)"] = "/".join(f"{x / 1e6:.1f}" for x in sizes)
