"""What ``pretrain_gpt.py`` and ``pretrain_bert.py`` share: flags first, heavy imports after."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from megatron_flex.arguments import ArgumentsError, parse
from megatron_flex.config.config import Architecture, Config
from megatron_flex.runtime.failure import run

# What megatron-core and torch say at import, in every worker, about parts that play no role here.
_SAID_FOR_NOTHING = (
    "Transformer Engine and Apex are not installed",  # its own optimizers are not used
    "full scope is deprecated",  # a default of megatron-core's own configuration
)


def pretrain_main(architecture: Architecture) -> NoReturn:
    """Read the command line, train, and end the process."""

    def main() -> None:
        # Must be set before torch is imported. Its C++ warnings come with stack traces.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        for message in _SAID_FOR_NOTHING:
            warnings.filterwarnings("ignore", message=message)
        config = parse(architecture=architecture, saved_values=saved_values)
        # torch and megatron-core take seconds to import: a wrong flag is said before.
        from megatron_flex.training import pretrain

        pretrain(config)

    run(main)


def saved_values(config: Config) -> Mapping[str, Any]:
    """The options that the checkpoint was written with, for ``--use-checkpoint-args``."""
    from megatron_flex.checkpoint.errors import CheckpointError
    from megatron_flex.loop.checkpointing import saved_arguments

    try:
        return saved_arguments(config.checkpoint)
    except CheckpointError as error:
        raise ArgumentsError([f"--use-checkpoint-args: {error}"]) from error
