"""Flags of this package's own layouts and schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.config.option import option


@dataclass(frozen=True, kw_only=True)
class FlexpipeOptions:
    """Layout and schedule."""

    flexpipe_plan: str | None = option(None, own=True)
    """The layout in full: for each stage its units and its workers, such as "0:5@0,1 | 5:9@2".
    Units are the embedding, then the attention half and the MLP half of each layer, then the output
    layer. Stages may have different numbers of workers."""

    flexpipe_schedule: Literal["1f1b", "gpipe"] = option("1f1b", own=True)
    """Order of the micro-batches on each worker: one forward, one backward; or all forwards
    first."""
