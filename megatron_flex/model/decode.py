"""Completions token by token: the keys and values of all earlier tokens are kept.

A prompt with its completion is a sample that is cut to slices (``prefix.py``): the prompt is the
first, and every token that is fed back is one of its own. So the kernels are those of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.block import Block
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.head import HeadBlock
from megatron_flex.model.prefix import PrefixStore

Stops = Sequence[Sequence[int]]
"""Tokens, or rows of them, after which a completion is over."""


@dataclass(frozen=True)
class Completion:
    """What a model adds to a prompt.

    Attributes:
        tokens: with those that ended it, if it was ended.
        stop: how many tokens of these are its end; 0: as many as there may be were made.
    """

    tokens: tuple[int, ...]
    stop: int = 0

    @property
    def said(self) -> tuple[int, ...]:
        """The tokens without its end."""
        return self.tokens[: len(self.tokens) - self.stop]


def room(config: ModelConfig, prompt: int, wanted: int) -> int:
    """How many tokens may follow a prompt of so many: the model's positions end.

    Raises:
        ValueError: none.
    """
    left = config.max_position_embeddings - prompt
    if prompt < 1 or left < 1:
        what = "is empty" if prompt < 1 else f"has {prompt} tokens"
        raise ValueError(
            f"a prompt {what}; the model completes prompts of 1 to"
            f" {config.max_position_embeddings - 1} tokens"
        )
    return min(wanted, left)


def ended(tokens: Sequence[int], stops: Stops) -> int:
    """How many of the last tokens are an end; 0 if none is."""
    for stop in stops:
        if stop and tuple(tokens[-len(stop) :]) == tuple(stop):
            return len(stop)
    return 0


class Growing:
    """A sample of which ever more tokens are known, as some units of the model see it."""

    def __init__(self, number: int, length: int) -> None:
        """``length``: tokens that are fed at most, which is what keys and values get room for."""
        self._number, self._length = number, length
        self._store = PrefixStore(training=False)
        self._done = 0

    def next(self, count: int, tokens: Tensor | None) -> PackedBatch:
        """The next ``count`` tokens as a micro-batch; ``tokens`` where the embedding runs."""
        start, self._done = self._done, self._done + count
        return PackedBatch(
            lengths=(count,),
            samples=(self._number,),
            starts=(start,),
            tokens=tokens,
            totals=(self._length,),
            prefixes=self._store,
        )


def logits_of_last(head: HeadBlock, hidden: Tensor) -> Tensor:
    """``[T, 1, H] -> [vocabulary]`` of the last token."""
    return head.logits(hidden[-1:])[0]


@torch.no_grad()
def complete(
    blocks: Sequence[Block],
    prompt: Sequence[int],
    tokens: int,
    choose: Callable[[Tensor], int],
    stops: Stops = (),
) -> Iterator[Completion]:
    """The completion as it grows, after each token.

    Args:
        blocks: all units of a model in evaluation mode, on one device.
        prompt: token ids.
        tokens: that are made at most.
        choose: the next token by its logits.
        stops: see :data:`Stops`.

    Raises:
        ValueError: the prompt is empty or too long, or the model is no GPT.
    """
    head, config = blocks[-1], blocks[0].config
    if config.architecture != "gpt":
        raise ValueError("a BERT fills in masks: only a GPT completes texts")
    assert isinstance(head, HeadBlock)
    most = room(config, len(prompt), tokens)
    device = next(blocks[0].parameters()).device
    sample = Growing(0, len(prompt) + most - 1)
    given, made = list(prompt), list[int]()
    while len(made) < most:
        batch = sample.next(len(given), torch.tensor(given, device=device))
        hidden: Tensor | None = None
        for block in blocks[:-1]:
            hidden = block(hidden, batch)
        assert hidden is not None
        made.append(choose(logits_of_last(head, hidden)))
        given = made[-1:]
        stop = ended(made, stops)
        yield Completion(tuple(made), stop)
        if stop:
            return
