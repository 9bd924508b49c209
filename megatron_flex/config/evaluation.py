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

    eval_generate: str | None = option(None, own=True)
    """File of prompts that the model completes at each validation, on the plan of training: a
    JSON object with text or messages a line, or the prompt as it is. Completions go to the log
    lines, --log-jsonl and TensorBoard."""

    eval_generate_tokens: int = option(64, own=True, at_least=1)
    """Tokens of a completion at most; the likeliest is taken each time."""

    chat_template: str | None = option(None, own=True)
    """Jinja2 file that writes the messages among the prompts; default: the tokenizer's own, else
    ChatML."""
