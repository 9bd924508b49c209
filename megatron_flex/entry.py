"""What ``pretrain_gpt.py`` and ``pretrain_bert.py`` share: flags first, heavy imports after."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from megatron_flex.arguments import ArgumentsError, parse
from megatron_flex.config.config import Architecture, Config
from megatron_flex.runtime.failure import run
from megatron_flex.signals import any_text, end_with_torchrun

# What megatron-core and torch say at import, in every worker, about parts that play no role here.
_SAID_FOR_NOTHING = (
    "Transformer Engine and Apex are not installed",  # its own optimizers are not used
    "full scope is deprecated",  # a default of megatron-core's own configuration
)


def pretrain_main(architecture: Architecture) -> NoReturn:
    """Read the command line, train, and end the process."""

    def main() -> None:
        end_with_torchrun()
        any_text()
        # Must be set before torch is imported. Its C++ warnings come with stack traces.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # NCCL's messages wait on the GPU. Where streams share a queue to it, what is computed may
        # stand behind a message that waits for it. Scripts for Megatron-LM often say 1.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        for message in _SAID_FOR_NOTHING:
            warnings.filterwarnings("ignore", message=message)
        config = parse(
            architecture=architecture, saved_values=saved_values, tensor_size=tensor_size
        )
        # torch and megatron-core take seconds to import: a wrong flag is said before. What they
        # make stays for good: no collection need look through it.
        gc.disable()
        from megatron_flex.loop.starting import convert_source
        from megatron_flex.pretrain import pretrain

        gc.freeze()
        gc.enable()
        convert_source(config, rank=int(os.environ.get("RANK", 0)))
        pretrain(config)

    saves = "--exit-signal-handler" in sys.argv
    run(
        main, "" if saves else ": nothing was saved (with --exit-signal-handler Ctrl-C saves first)"
    )


def tensor_size(build: Callable[[int], Config], workers: int) -> int:
    """How many workers share each layer, where the flags leave that open."""
    from megatron_flex.loop.starting import convert_source
    from megatron_flex.loop.tensor_size import chosen_size, first_possible

    # Of a Hugging Face directory the flags name the tokenizer that is converted with the weights.
    if (config := first_possible(build, workers)) is not None:
        convert_source(config, rank=int(os.environ.get("RANK", 0)))
    return chosen_size(build, workers)


def saved_values(config: Config) -> Mapping[str, Any]:
    """What the model to start from says: for ``--use-checkpoint-args`` and ``--load-hf``."""
    from megatron_flex.checkpoint.errors import CheckpointError
    from megatron_flex.loop.starting import source_arguments

    try:
        return source_arguments(config)
    except CheckpointError as error:
        hf = config.checkpoint.load_hf is not None
        flag = "--load-hf" if hf else "--use-checkpoint-args"
        raise ArgumentsError([f"{flag}: {error}"]) from error
