"""Flags of saving and loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.config.option import option

SAVE_INTERVAL = 500
"""Iterations between checkpoints where nobody says."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints do not depend on the plan or on the number of workers."""

    save: str | None = None
    """Directory that checkpoints are written to."""

    save_interval: int | None = option(
        None, flags=("--save-interval", "--persistent-save-interval"), at_least=1
    )
    """Iterations between checkpoints; the end of a run is saved in any case. Not set: 500 with
    --save (Megatron-LM has no default)."""

    save_retain_interval: int | None = option(None, at_least=1)
    """Keep the checkpoints at multiples of this many iterations and the newest; delete others."""

    keep_last_n: int | None = option(None, own=True, at_least=1)
    """Keep the newest N checkpoints, and those that --save-retain-interval keeps; delete others."""

    save_optim: bool = option(True, flags=("--no-save-optim",))
    """Leave the optimizer's state out of checkpoints."""

    save_rng: bool = option(True, flags=("--no-save-rng",))
    """Leave the dropout keys out of checkpoints."""

    load: str | None = None
    """Directory that the newest checkpoint is loaded from: the one that
    latest_checkpointed_iteration.txt names there. Checkpoints without that file are an error."""

    load_optim: bool = option(True, flags=("--no-load-optim",))
    """Do not load the optimizer's state: moments start at zero, and master weights from the
    weights. The position in the learning-rate schedule is loaded all the same."""

    load_rng: bool = option(True, flags=("--no-load-rng",))
    """Do not load the dropout keys."""

    ckpt_step: int | None = option(None, at_least=0)
    """Iteration of the checkpoint to load, instead of the newest."""

    finetune: bool = False
    """Load the weights only, and start at iteration 0."""

    pretrained_checkpoint: str | None = None
    """Directory of a checkpoint to fine-tune when --load holds none yet."""

    load_hf: str | None = option(None, own=True)
    """Directory of a Hugging Face model to fine-tune when --load holds no checkpoint yet. It gives
    the model's flags and the tokenizer, as --use-checkpoint-args does, and is converted once, into
    --save."""

    use_checkpoint_args: bool = False
    """Take the model's shape and the tokenizer from the checkpoint instead of the flags."""

    exit_on_missing_checkpoint: bool = False
    """Stop when --load holds no checkpoint, instead of starting from random weights."""

    ckpt_format: Literal["torch_dcp"] = "torch_dcp"
    """Format on disk: torch.distributed.checkpoint with Megatron's parameter names. Megatron-LM's
    default is torch_dist."""

    async_save: bool = False
    """Write checkpoints in the background while training goes on."""
