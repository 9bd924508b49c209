"""Flags of the training run: its batches, its length and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.batch_size import BatchSizeSchedule
from megatron_flex.config.option import option


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The training run."""

    micro_batch_size: int | None = option(None, at_least=1)
    """Samples in a micro-batch. Either this or --micro-batch-tokens."""

    global_batch_size: int = option(
        derived="micro-batch-size x world size / pipeline-model-parallel-size", at_least=1
    )
    """Samples in a batch, over all workers. It need not be a multiple of anything."""

    rampup_batch_size: tuple[int, int, int] | None = option(None, at_least=0)
    """Start with this batch size, and add this increment until --global-batch-size is reached after
    this many samples."""

    train_iters: int = option(derived="from train-samples", at_least=1)
    """Number of iterations in all, over all runs. Either this or --train-samples."""

    train_samples: int | None = option(None, at_least=1)
    """Number of samples in all, over all runs; a last batch that is not full is left out."""

    exit_interval: int | None = option(None, at_least=1)
    """Save and exit after an iteration that is a multiple of this."""

    exit_duration_in_mins: int | None = option(None, at_least=1)
    """Save and exit after this many minutes."""

    exit_signal_handler: bool = False
    """Save and exit at the end of the iteration in which any worker received SIGTERM or Ctrl-C; a
    second Ctrl-C ends at once, without saving."""

    seed: int = option(1234, at_least=0, at_most=2**63 - 1)
    """Seed of the weights, of the order of the samples and of dropout."""

    optimizer: Literal["adam"] = "adam"
    """The optimizer: Adam with decoupled weight decay."""

    weight_decay: float = option(0.01, at_least=0)
    """Weight decay of matrices; biases and normalization weights have none."""

    clip_grad: float = option(1.0, at_least=0)
    """Scale gradients down to this L2 norm over all parameters; 0 does not."""

    adam_beta1: float = option(0.9, at_least=0, below=1)
    """Decay of Adam's first moment."""

    adam_beta2: float = option(0.999, at_least=0, below=1)
    """Decay of Adam's second moment."""

    adam_eps: float = option(1e-8, above=0)
    """Added to the denominator of Adam's step."""

    calculate_per_token_loss: bool = option(True, always=True)
    """The loss is a mean over all loss tokens of the global batch. Here it always is, whatever the
    plan; Megatron-LM without this flag takes a mean of the micro-batches' means."""

    @property
    def batch_sizes(self) -> BatchSizeSchedule:
        """Size of the global batch as a function of the consumed samples."""
        return BatchSizeSchedule(self.global_batch_size, self.rampup_batch_size)
