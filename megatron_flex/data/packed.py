"""The tensors of one micro-batch, packed without padding (THD with a batch dimension of one).

Where samples are padded, their padding is part of them: each is as long as all others. Padding that
makes the whole a multiple of so many tokens is a sample of its own, behind the others.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from megatron_flex.data.microbatch import Slice


def cut_slice(slices: tuple[Slice, ...]) -> Slice | None:
    """The slice of a sample that is cut; it is the first, all others are whole samples.

    Raises ``ValueError`` if another one is cut.
    """
    if not all(part.whole for part in slices[1:]):
        raise ValueError(
            "attention needs whole samples: of a micro-batch only the first may be a slice"
        )
    return None if slices[0].whole else slices[0]


@dataclass(frozen=True)
class PackedBatch:
    """What the modules need to know about a micro-batch; immutable, so recompute sees the same.

    Attributes:
        lengths: tokens of each slice; their sum is T.
        samples: consumed-sample number of each slice, the key of its dropout.
        starts: position of each slice's first token within its sample (0 for whole samples).
        tokens: ``[T]`` int64 input tokens; ``None`` where no embedding runs.
        labels: ``[T]`` int64 targets; ``None`` where no head runs.
        loss_mask: ``[T]`` float32 weight of each target; ``None`` where no head runs.
        token_types: ``[T]`` int64 segment of each token (BERT with a sentence-order head).
        sentence_order: ``[number of slices]`` int64 target of the sentence-order head.
        totals: tokens of each slice's whole sample; by default each slice is the last of its own.
        prefixes: what the run keeps of samples that are cut (``model/prefix.py``); without it cut
            samples are refused.
        counted: tokens of each sample before its padding; empty: there is none. Padding has no loss
            and is nothing that a token attends to.
    """

    lengths: tuple[int, ...]
    samples: tuple[int, ...]
    starts: tuple[int, ...]
    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    token_types: torch.Tensor | None = None
    sentence_order: torch.Tensor | None = None
    totals: tuple[int, ...] = ()
    prefixes: object | None = None
    counted: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.totals:
            ends = tuple(s + n for s, n in zip(self.starts, self.lengths, strict=True))
            object.__setattr__(self, "totals", ends)

    def padded(self, length: int) -> PackedBatch:
        """The same with each of its whole samples padded to ``length`` tokens.

        Padding is token 0 of segment 0 with label 0, and weighs nothing in the loss.
        """
        if not all(part.whole for part in self.slices) or max(self.lengths) > length:
            raise ValueError(f"whole samples of at most {length} tokens are padded to that")
        count = len(self.lengths)
        real = torch.arange(length) < torch.tensor(self.lengths)[:, None]

        def pad(x: torch.Tensor | None) -> torch.Tensor | None:
            if x is None:
                return None
            found = x.new_zeros(count, length)
            found[real] = x
            return found.flatten()

        return replace(
            self,
            lengths=(length,) * count,
            totals=(length,) * count,
            tokens=pad(self.tokens),
            labels=pad(self.labels),
            loss_mask=pad(self.loss_mask),
            token_types=pad(self.token_types),
            counted=self.lengths,
        )

    def with_tail(self, count: int) -> PackedBatch:
        """The same with so many tokens of padding behind it, as one more sample.

        As with :meth:`padded`; its dropout is that of the first sample, and its sentence order -1,
        which is no target.
        """
        if self.counted:
            raise ValueError("samples are padded already: padding behind them is for packed ones")

        def pad(x: torch.Tensor | None, value: int = 0, rows: int = count) -> torch.Tensor | None:
            return None if x is None else torch.cat((x, x.new_full((rows,), value)))

        return replace(
            self,
            lengths=(*self.lengths, count),
            samples=(*self.samples, self.samples[0]),
            starts=(*self.starts, 0),
            totals=(*self.totals, count),
            tokens=pad(self.tokens),
            labels=pad(self.labels),
            loss_mask=pad(self.loss_mask),
            token_types=pad(self.token_types),
            sentence_order=pad(self.sentence_order, -1, 1),
        )

    def to(self, device: torch.device) -> PackedBatch:
        """The same with all tensors on ``device``; itself where they are there already."""
        if device.type == "cpu":
            return self
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            name: tensor.to(device, non_blocking=True)
            for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor)
        }
        return replace(self, **moved)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Which tokens of which samples these are."""
        ends = zip(self.samples, self.starts, self.lengths, self.totals, strict=True)
        return tuple(Slice(sample, s, s + n, total) for sample, s, n, total in ends)

    @cached_property
    def cut(self) -> Slice | None:
        """The slice of a sample that is cut: see :func:`cut_slice`."""
        return cut_slice(self.slices)

    @property
    def num_tokens(self) -> int:
        """T: the first dimension of every activation."""
        return sum(self.lengths)

    @cached_property
    def positions(self) -> torch.Tensor:
        """``[T]`` int64 position of each token within its sample."""
        return torch.cat(
            [torch.arange(s, s + n) for s, n in zip(self.starts, self.lengths, strict=True)]
        )
