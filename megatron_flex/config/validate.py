"""Flags that contradict each other or have no effect, found before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable

from megatron_flex.config.checks.data import data_problems, tokenizer_problems
from megatron_flex.config.checks.flexpipe import (
    batching_problems,
    slices_problems,
    switching_problems,
)
from megatron_flex.config.checks.layers import layer_problems
from megatron_flex.config.checks.model import model_problems
from megatron_flex.config.checks.output import checkpoint_problems, files_problems, logging_problems
from megatron_flex.config.checks.parallel import parallel_problems, tensor_problems
from megatron_flex.config.checks.training import (
    evaluation_problems,
    recompute_problems,
    schedule_problems,
)
from megatron_flex.config.checks.without import Problems
from megatron_flex.config.config import Config

_CHECKS: tuple[Callable[[Config], Problems], ...] = (
    model_problems,
    layer_problems,
    data_problems,
    tokenizer_problems,
    schedule_problems,
    checkpoint_problems,
    logging_problems,
    evaluation_problems,
    tensor_problems,
    parallel_problems,
    recompute_problems,
    slices_problems,
    batching_problems,
    switching_problems,
    files_problems,
)


def problems(config: Config) -> list[str]:
    """Everything that is wrong with a configuration whose values are each allowed."""
    return [problem for check in _CHECKS for problem in check(config)]
