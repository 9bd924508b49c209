"""Flags of the learning-rate and weight-decay schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.config.option import option


@dataclass(frozen=True, kw_only=True)
class LearningRateOptions:
    """Learning rate and weight decay over the run; megatron-core's scheduler computes them."""

    lr: float = option(required=True, above=0)
    """Highest learning rate."""

    min_lr: float = option(0.0, at_least=0)
    """Lowest learning rate after the warm-up."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """How the learning rate falls after the warm-up."""

    lr_decay_iters: int | None = option(None, at_least=1)
    """Iterations until --min-lr is reached. Not set: --train-iters."""

    lr_decay_samples: int | None = option(None, at_least=1)
    """Samples until --min-lr is reached, with --train-samples. Not set: --train-samples."""

    lr_warmup_fraction: float | None = option(None, at_least=0, below=1)
    """Share of the decay iterations or samples in which the learning rate rises."""

    lr_warmup_iters: int = option(0, at_least=0)
    """Iterations in which the learning rate rises."""

    lr_warmup_samples: int = option(0, at_least=0)
    """Samples in which the learning rate rises, with --train-samples."""

    lr_warmup_init: float = option(0.0, at_least=0)
    """Learning rate at the start of the warm-up."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """How the learning rate falls at the end of a WSD schedule."""

    lr_wsd_decay_iters: int | None = option(None, at_least=1)
    """Iterations of the fall at the end of a WSD schedule."""

    lr_wsd_decay_samples: int | None = option(None, at_least=1)
    """Samples of the fall at the end of a WSD schedule, with --train-samples."""

    override_opt_param_scheduler: bool = option(
        False, flags=("--override-opt_param-scheduler", "--override-opt-param-scheduler")
    )
    """Take the schedule from the flags, not from the checkpoint; only its position is loaded."""

    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        flags=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    )
    """Take the schedule from the checkpoint, not from the flags."""

    start_weight_decay: float | None = option(None, at_least=0)
    """Weight decay at the start, with --weight-decay-incr-style linear or cosine."""

    end_weight_decay: float | None = option(None, at_least=0)
    """Weight decay at the end, with --weight-decay-incr-style linear or cosine."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay grows over the run."""
