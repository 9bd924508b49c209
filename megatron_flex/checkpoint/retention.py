"""Which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """Keep the newest ``keep`` checkpoints, and all whose iteration is a multiple of ``interval``.

    ``interval`` is Megatron's ``--save-retain-interval``, which keeps one newest besides unless
    ``keep`` says more. With neither, all are kept.
    """

    keep: int | None = None
    interval: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep", self.keep), ("interval", self.interval)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")

    def expired(self, iterations: Iterable[int], newest: int) -> list[int]:
        """Those of ``iterations`` to delete, once ``newest`` has been saved.

        Later iterations than ``newest`` are of a run that was given up (``--ckpt-step``): they
        neither count nor are deleted, since only their owner can tell whether they are of use.
        """
        if self.keep is None and self.interval is None:
            return []
        past = sorted(i for i in iterations if i <= newest)
        return [
            i for i in past[: -(self.keep or 1)] if self.interval is None or i % self.interval != 0
        ]


KEEP_ALL = Retention()
