"""Flags of this package's own layouts, schedules and switches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.config.option import option


@dataclass(frozen=True, kw_only=True)
class FlexpipeOptions:
    """Layout, schedule, and how they change from iteration to iteration."""

    flexpipe_plan: str | None = option(None, own=True)
    """The layout in full: for each stage its units and its workers, such as "0:5@0,1 | 5:9@2".
    Units are the embedding, then the attention half and the MLP half of each layer, then the output
    layer. Stages may have different numbers of workers."""

    flexpipe_schedule: Literal["1f1b", "gpipe"] = option("1f1b", own=True)
    """Order of the micro-batches on each worker: one forward, one backward; or all forwards
    first."""

    flexpipe_plans: str | None = option(None, own=True)
    """File with the layout of every iteration, one a line in the form of --flexpipe-plan; what
    follows a # is ignored, and the last line stays. The run switches between them."""

    flexpipe_record: str | None = option(None, own=True)
    """File that gets the layout of every iteration and why it was chosen. --flexpipe-plans reads
    it."""

    flexpipe_switch: Literal["live", "handover", "stall", "restart"] = option("live", own=True)
    """How a layout becomes the next. live: state moves while the iteration computes; handover: after
    its update; stall: between iterations, while all wait; restart: through a checkpoint in the
    --save directory, with new process groups. All but live are for comparison."""

    flexpipe_bitwise: bool = option(False, own=True)
    """Sum gradients exactly: losses and weights have the same bits under any layouts and numbers
    of workers. Takes 8 more bytes a parameter and twice the volume of gradients."""

    flexpipe_trace: str | None = option(None, own=True)
    """File for a trace of every instruction of every worker, in the Chrome trace format (Perfetto,
    chrome://tracing)."""
