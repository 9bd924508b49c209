"""Tensors of which every rank of a group has a part only.

A checkpoint holds full tensors. Who has a part of one writes its blocks, each a chunk of the full
tensor for torch.distributed.checkpoint, and reads its blocks from whatever chunks there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.tensor_cut import Piece, cut_of, full_shape, pieces

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What one rank has of a tensor.

    Attributes:
        local: the rank's own tensor.
        shape: of the full tensor.
        pieces: the blocks of the full tensor that ``local`` consists of.
    """

    local: torch.Tensor
    shape: Shape
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Part:
        """All of a tensor."""
        shape, zero = tuple(tensor.shape), (0,) * tensor.dim()
        return cls(tensor, shape, (Piece(zero, shape, zero),))

    def view(self, piece: Piece) -> torch.Tensor:
        """A block, or a part of one that begins where it does."""
        found = self.local.detach()
        for dim, (start, size) in enumerate(zip(piece.local, piece.sizes, strict=True)):
            found = found.narrow(dim, start, size)
        return found

    def at(self, offsets: Iterable[int]) -> torch.Tensor:
        """The block that begins at these offsets in the full tensor."""
        wanted = tuple(offsets)
        return next(self.view(piece) for piece in self.pieces if piece.offsets == wanted)

    def first_rows(self, rows: int) -> Part:
        """The same without what lies after the first ``rows`` rows of the full tensor."""
        kept = []
        for piece in self.pieces:
            size = min(piece.sizes[0], rows - piece.offsets[0])
            if size > 0:
                kept.append(replace(piece, sizes=(size, *piece.sizes[1:])))
        return replace(self, pieces=tuple(kept))


Value = torch.Tensor | Part
"""A tensor that this rank has whole, or its part of one."""


def local_of(value: Value) -> torch.Tensor:
    """The rank's own tensor."""
    return value.local if isinstance(value, Part) else value


def with_local(value: Value, local: torch.Tensor) -> Value:
    """The same with another tensor of this rank, of the same shape."""
    return replace(value, local=local) if isinstance(value, Part) else local


def parts_of(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], index: int, size: int
) -> dict[str, Value]:
    """A rank's tensors as parts of the model's, by their names (of parameters or their state).

    ``index`` and ``size`` of its tensor-parallel group. Replicated ones are whole on every rank.
    """
    found: dict[str, Value] = {}
    for name, tensor in tensors.items():
        cut = cut_of(config, name)
        if size == 1 or cut is None:
            found[name] = tensor
            continue
        shape = full_shape(tensor.shape, cut, size)
        found[name] = Part(tensor, shape, pieces(shape, cut, index, size))
    return found


def written_by(values: Mapping[str, Value], index: int) -> dict[str, Value]:
    """What rank ``index`` of a group writes: its parts, and as the first what all have."""
    return {n: v for n, v in values.items() if index == 0 or isinstance(v, Part)}
