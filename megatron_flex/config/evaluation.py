"""Flags of validation and test."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flex.config.option import option


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Validation during training, validation and test at its end."""

    eval_interval: int | None = option(None, at_least=1)
    """Iterations between validations."""

    eval_iters: int = option(100, at_least=0)
    """Batches of a validation or test; all there is if that is less."""

    skip_train: bool = False
    """Do not train: load, validate, test, exit."""

    full_validation: bool = False
    """Validate on the whole validation set each time."""
