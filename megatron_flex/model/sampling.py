"""The next token from a model's logits: the likeliest, or drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_flex.model.keys import mix


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the names are Megatron-LM's.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token always.
        top_k: draw from so many likeliest tokens; 0 from all.
        top_p: draw from the likeliest tokens that together have this probability; 0 or 1 from all.
        seed: keys the draws. Those of one prompt do not depend on the other prompts.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature must be at least 0, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"--top-k must be at least 0, not {self.top_k}")
        if not 0.0 <= self.top_p <= 1.0:
            raise ValueError(f"--top-p must be from 0 to 1, not {self.top_p}")


class Sampler:
    """Chooses the tokens of one prompt, one after the other."""

    def __init__(self, sampling: Sampling, prompt: int) -> None:
        """``prompt``: its number, which keys the draws beside the seed."""
        self._sampling = sampling
        self._generator = torch.Generator()
        self._generator.manual_seed(mix(mix(sampling.seed) ^ (prompt + 1)) >> 1)

    def choose(self, logits: Tensor) -> int:
        """A token by its logits ``[vocabulary]``."""
        s = self._sampling
        if s.temperature == 0.0:
            return int(logits.argmax())
        # On the host, so that a seed means the same on every device.
        scores = logits.detach().double().cpu()
        scores = (scores - scores.max()) / s.temperature
        if 0 < s.top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(s.top_k).values[-1], -torch.inf)
        probabilities = scores.softmax(0)
        if 0.0 < s.top_p < 1.0:
            ordered, places = probabilities.sort(descending=True, stable=True)
            # A token stays where those before it have less than top_p.
            gone = places[ordered.cumsum(0) - ordered >= s.top_p]
            probabilities[gone] = 0.0
        return int(torch.multinomial(probabilities, 1, generator=self._generator))
