"""How far a run has come: what a resumed run continues from, beside weights and optimizer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """Counters of a run after some iterations.

    Attributes:
        iteration: iterations done.
        consumed_samples: samples of those iterations: the position in the data.
        skipped: iterations without an update (non-finite norm, or no loss token).
        nan: iterations whose gradient norm was NaN or infinite.
        tokens: input tokens of those iterations.
        flops: model FLOPs of those iterations.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped: int = 0
    nan: int = 0
    tokens: int = 0
    flops: float = 0.0

    def values(self) -> dict[str, Any]:
        """As plain values, for a checkpoint."""
        return asdict(self)
