"""How each kind of training cuts a batch: from lengths to what goes through a pipeline together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from megatron_flex.data.cut import Cut
from megatron_flex.data.errors import DataError
from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.simulation import static_bytes
from megatron_flex.planner.ways import batch_of, ways
from megatron_flex.simulator import dynapipe
from megatron_flex.simulator.padding import Padded, batch_of_padded, by_bucket, by_count


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
class ByCount:
    """Megatron's: a number of samples, padded alike (``length`` 0: to the longest of the batch)."""

    size: int
    length: int = 0
    by_plan: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """See :class:`Batching`."""
        return f"{self.size} samples padded"

    def ways(self, lengths: Sequence[int], plan: Plan, costs: ModelCosts) -> tuple[Batch, ...]:
        """See :class:`Batching`."""
        return (batch_of_padded(by_count(lengths, self.size, self.length)),)


@dataclass(frozen=True)
class ByBucket:
    """Samples of like length together, padded, up to a number of computed tokens."""

    budget: int
    by_plan: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """See :class:`Batching`."""
        return f"sorted, {self.budget} tokens padded"

    def ways(self, lengths: Sequence[int], plan: Plan, costs: ModelCosts) -> tuple[Batch, ...]:
        """See :class:`Batching`."""
        return tuple(map(batch_of_padded, _orders(by_bucket(lengths, self.budget))))


@dataclass(frozen=True)
class ByCut:
    """As the trainer cuts: packed or by cost, whole or in slices; several ways where it is open."""

    cut: Cut
    name: str
    by_plan: ClassVar[bool] = False

    def ways(self, lengths: Sequence[int], plan: Plan, costs: ModelCosts) -> tuple[Batch, ...]:
        """See :class:`Batching`."""
        if self.cut.open:
            return tuple(ways(self.cut, lengths, len(costs.devices)))
        return (batch_of(self.cut, lengths),)


@dataclass(frozen=True)
class ByDynaPipe:
    """DynaPipe's dynamic programming; where nothing else fits, for stages that recompute all.

    Its estimate takes replicas for balanced, and a pipeline for full. So runs that leave each
    replica at least 1, 2 and 4 are tried, too.
    """

    name: str = "DynaPipe"
    by_plan: ClassVar[bool] = True

    def ways(self, lengths: Sequence[int], plan: Plan, costs: ModelCosts) -> tuple[Batch, ...]:
        """See :class:`Batching`."""
        found: dict[tuple[Padded, ...], None] = {}
        for again in (False, True):
            if found:
                break
            for rounds in (0, 1, 2, 4):
                try:
                    parts = dynapipe.micro_batches(
                        lengths,
                        _stage_time(costs, plan, again),
                        stages=len(plan.stages),
                        replicas=plan.degrees[0],
                        most_tokens=_most_tokens(costs, plan, again),
                        parts=rounds * plan.degrees[0],
                    )
                except DataError:
                    continue
                found.update(dict.fromkeys(_orders(parts)))
        return tuple(map(batch_of_padded, found))


def _orders(ascending: tuple[Padded, ...]) -> tuple[tuple[Padded, ...], ...]:
    """Orders of entry to choose from: the shortest first, last, and both."""
    tent = ascending[0::2] + ascending[1::2][::-1]
    return tuple(dict.fromkeys((ascending, tent, ascending[::-1])))


def _stage_time(costs: ModelCosts, plan: Plan, again: bool) -> dynapipe.StageTime:
    """Forward and backward of the slowest stage; ``again``: everything is recomputed."""
    lines = costs.backward + costs.forward * (2.0 if again else 1.0)
    sums = [lines[:, s.start : s.stop].sum(axis=1) for s in plan.stages]
    fixed, token, pair = max(sums, key=lambda line: float(line[1]))
    return dynapipe.StageTime(float(fixed), float(token), float(pair))


def _most_tokens(costs: ModelCosts, plan: Plan, again: bool) -> float:
    """Tokens of a micro-batch of which each stage has room for as many as 1F1B has in flight."""
    none = Batch(np.zeros(1), np.zeros(1))
    one = Batch(np.ones(1), np.ones(1))
    state = static_bytes(costs, plan, none)
    besides = [b - a for a, b in zip(state, static_bytes(costs, plan, one), strict=True)]
    kept = np.minimum(costs.activation, costs.profile.boundary) if again else costs.activation
    most = math.inf
    for number, stage in enumerate(plan.stages):
        device = stage.group[0]
        held = float(kept[stage.start : stage.stop].sum()) * (len(plan.stages) - number)
        most = min(most, max(0.0, costs.budget - state[device]) / (held + besides[device]))
    return most
