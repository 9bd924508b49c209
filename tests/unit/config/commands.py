"""Command lines for the tests."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

import pytest

from megatron_flex.arguments import ArgumentsError, parse
from megatron_flex.config.config import Architecture, Config

_TEXT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 512 --mock-data"
    " --vocab-size 1000 --micro-batch-tokens 1024 --global-batch-size 16 --train-iters 20 --lr 1e-3"
)
BASE = _TEXT.split()
"""A command line that is right."""


def config(
    *more: str,
    without: Sequence[str] = (),
    world_size: int = 4,
    architecture: Architecture = "gpt",
) -> Config:
    """Parse :data:`BASE` without some flags and with more words (``"--seed 3"``)."""
    return parse(command(*more, without=without), architecture=architecture, world_size=world_size)


def command(*more: str, without: Sequence[str] = ()) -> list[str]:
    """The words of :func:`config`."""
    words: list[str] = []
    skipping = False
    for word in BASE:
        if word.startswith("--"):
            skipping = word in without
        if not skipping:
            words.append(word)
    return [*words, *(part for text in more for part in text.split())]


def refusal(
    *more: str,
    without: Sequence[str] = (),
    world_size: int = 4,
    architecture: Architecture = "gpt",
) -> str:
    """The message of a command line that is wrong; checks exit status and output on the way."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(ArgumentsError) as caught:
        config(*more, without=without, world_size=world_size, architecture=architecture)
    assert caught.value.code == 2
    assert errors.getvalue() == f"arguments: error: {caught.value}\n"
    return str(caught.value)
