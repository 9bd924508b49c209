"""What Megatron's loading flags mean together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_flex.checkpoint.layout import latest, locate

OPTIMIZER = "optimizer."
"""Names of the optimizer's tensors begin with this."""


@dataclass(frozen=True)
class LoadOptions:
    """Which part of which checkpoint a run starts from. Field names follow Megatron's flags.

    ``finetune``: weights only, and training starts at iteration 0 with fresh data, scheduler and
    counters. ``load_optim`` / ``load_rng`` are off with ``--no-load-optim`` / ``--no-load-rng``.
    ``ckpt_step``: this iteration instead of the tracker's. ``exit_on_missing_checkpoint``: no
    checkpoint is an error instead of a start from scratch.
    """

    finetune: bool = False
    load_optim: bool = True
    load_rng: bool = True
    ckpt_step: int | None = None
    exit_on_missing_checkpoint: bool = False

    @property
    def optimizer(self) -> bool:
        """Whether optimizer state is taken from the checkpoint."""
        return self.load_optim and not self.finetune

    @property
    def rng(self) -> bool:
        """Whether the seed that keys dropout and data order is taken from the checkpoint."""
        return self.load_rng and not self.finetune

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Those of a run's tensor names that are to be loaded."""
        return [name for name in names if self.optimizer or not name.startswith(OPTIMIZER)]

    def iteration(self, directory: Path | str) -> int | None:
        """The iteration to load from ``directory``; ``None``: start from scratch.

        Raises :class:`CheckpointError` when ``ckpt_step`` is not there, when nothing is there and
        ``exit_on_missing_checkpoint`` is set, or when there are checkpoints without a tracker.
        """
        if self.ckpt_step is not None:
            locate(directory, self.ckpt_step)
            return self.ckpt_step
        found = latest(directory)
        if found is None and self.exit_on_missing_checkpoint:
            locate(directory)
        return found
