"""The layer list: which units a model consists of, and which slabs hold their parameters.

A *unit* is what a plan places: the embedding, one half of a transformer layer (attention or
MLP), or the output head. A *slab* is what is copied, reduced, updated and saved: one contiguous
buffer of parameters. Unit ``i`` owns slab ``i``; a tied word embedding is a slab of its own,
shared by the embedding and the head. Values only: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Kind(str, Enum):
    """What a unit computes."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    HEAD = "head"


@dataclass(frozen=True)
class Unit:
    """One entry of the layer list.

    ``layer`` is the 0-based transformer layer, or ``None`` for embedding and head.
    ``slabs`` are the slabs that hold its parameters, in ascending order.
    """

    index: int
    kind: Kind
    layer: int | None
    slabs: tuple[int, ...]


@dataclass(frozen=True)
class LayerList:
    """All units of a model in execution order: embedding, (attention, MLP) x n, head."""

    num_layers: int
    tied: bool

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"a model needs at least one layer, not {self.num_layers}")

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The units, ``2 * num_layers + 2`` of them."""
        last = 2 * self.num_layers + 1
        tied = (last + 1,) if self.tied else ()
        body = (
            Unit(i, Kind.ATTENTION if i % 2 else Kind.MLP, (i - 1) // 2, (i,))
            for i in range(1, last)
        )
        return (
            Unit(0, Kind.EMBEDDING, None, (0, *tied)),
            *body,
            Unit(last, Kind.HEAD, None, (last, *tied)),
        )

    @property
    def num_units(self) -> int:
        """Number of units."""
        return 2 * self.num_layers + 2

    @property
    def num_slabs(self) -> int:
        """Number of slabs: one a unit, and one for the tied word embedding."""
        return self.num_units + (1 if self.tied else 0)

    @property
    def tied_slab(self) -> int | None:
        """The slab of the tied word embedding."""
        return self.num_units if self.tied else None
