"""How each kind of training cuts a batch: from lengths to what goes through a pipeline together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from megatron_flex.data.cut import Cut
from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.dynapipe import dynapipe_of
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.ways import ways


class Batching(Protocol):
    """A rule, and what of it is tuned.

    Attributes:
        by_plan: what it does depends on the plan.
    """

    by_plan: ClassVar[bool]

    @property
    def name(self) -> str:
        """In words, for tables."""

    def ways(self, lengths: Sequence[int], plan: Plan, costs: ModelCosts) -> tuple[Batch, ...]:
        """The ways of cutting a batch that are chosen among for every batch; none: it cannot be."""


@dataclass(frozen=True)
class ByCut:
    """As the trainer cuts, with the same flags; several ways where it is open."""

    cut: Cut
    name: str
    by_plan: ClassVar[bool] = False

    def ways(self, lengths: Sequence[int], plan: Plan, costs: ModelCosts) -> tuple[Batch, ...]:
        """See :class:`Batching`."""
        return tuple(ways(self.cut, lengths, costs.num_devices))


@dataclass(frozen=True)
class ByDynaPipe:
    """DynaPipe's dynamic programming for the plan."""

    name: str = "DynaPipe"
    by_plan: ClassVar[bool] = True

    def ways(self, lengths: Sequence[int], plan: Plan, costs: ModelCosts) -> tuple[Batch, ...]:
        """See :class:`Batching`."""
        cut = Cut(pad="dynapipe", dynapipe=dynapipe_of(costs, plan))
        return tuple(ways(cut, lengths, costs.num_devices))


def by_count(size: int, length: int = 0) -> ByCut:
    """Megatron's: a number of samples, all padded alike (``length`` 0: to the batch's longest)."""
    return ByCut(Cut(count=size, pad="batch", pad_to=length), f"{size} samples padded")


def by_bucket(budget: int) -> ByCut:
    """Samples of like length together, padded, up to a number of computed tokens."""
    return ByCut(Cut(budget, pad="bucket"), f"sorted, {budget} tokens padded")
