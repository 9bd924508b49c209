"""What every operation of an iteration costs: the input of the simulator.

Times are seconds, sizes are bytes; an index is the stage, then the micro-batch. The numbers
come from the planner's cost model (or from a test); nothing here knows devices or links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TABLES = (
    "forward", "backward_input", "backward_weight", "transfer", "activation", "chain_bytes"
)  # fmt: skip
"""Costs that are given for each stage (or boundary) and micro-batch."""


@dataclass(frozen=True, eq=False)
class OpCosts:
    """Costs of one iteration on one plan.

    Tables are arrays; given as nested sequences, they become arrays.

    Attributes:
        forward: ``forward[stage][micro_batch]``, seconds.
        backward_input: seconds of the gradient of the input (first half of the backward).
        backward_weight: seconds of the gradient of the weights (second half). A fused backward
            takes the sum of both.
        transfer: ``transfer[boundary][micro_batch]``, seconds on the link between stage
            ``boundary`` and ``boundary + 1``, the same for activation and gradient. Only paid
            where the two stages run on different devices. One row less than stages.
        activation: ``activation[stage][micro_batch]``, bytes that a forward leaves until its
            weight gradient is done.
        reduce: seconds of the gradient reduction of each slab; empty means none.
        update: seconds of the optimizer update of each slab on one device; empty means none.
        chain_bytes: ``chain_bytes[stage][micro_batch]``, bytes that a slice of a longer sample
            leaves besides until the whole sample is through: its keys and values, and their
            gradients. Left out: none.
        width: devices that each one stands for. Where there are several, the gradient of a slab
            with one holder is reduced, too.
    """

    forward: Floats
    backward_input: Floats
    backward_weight: Floats
    transfer: Floats
    activation: Floats
    reduce: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    chain_bytes: Floats = field(default_factory=lambda: np.zeros(0))
    width: int = 1

    def __post_init__(self) -> None:
        forward = np.asarray(self.forward, dtype=np.float64)
        if forward.ndim != 2 or not forward.size:
            raise ValueError("costs need at least one stage and one micro-batch")
        stages, batches = forward.shape
        for name in TABLES:
            table: Floats = np.asarray(getattr(self, name), dtype=np.float64)
            rows = stages - 1 if name == "transfer" else stages
            if name == "chain_bytes" and not table.size:
                table = np.zeros(forward.shape)
            if not rows and not table.size:
                table = np.zeros((0, batches))
            if table.shape != (rows, batches):
                raise ValueError(
                    f"costs.{name} must have {rows} rows of {batches} micro-batches, as"
                    " costs.forward implies"
                )
            object.__setattr__(self, name, table)
        for name in (*TABLES, "reduce", "update"):
            rows_ = np.atleast_2d(np.asarray(getattr(self, name), dtype=np.float64))
            bad = ~((rows_ >= 0.0) & np.isfinite(rows_)).all(axis=1)
            if bad.any():
                raise ValueError(
                    f"costs.{name}, row {int(bad.argmax())}: costs must be finite and not negative"
                )

    def __eq__(self, other: object) -> bool:
        """Equal in every number."""
        return (
            isinstance(other, OpCosts)
            and (self.reduce, self.update) == (other.reduce, other.update)
            and self.width == other.width
            and all(np.array_equal(getattr(self, n), getattr(other, n)) for n in TABLES)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches."""
        return self.forward.shape[1]

    @cached_property
    def works(self) -> Floats:
        """``[stages, micro_batches]``: forward and backward, seconds."""
        found: Floats = self.forward + self.backward_input
        return found + self.backward_weight

    @cached_property
    def totals(self) -> tuple[float, ...]:
        """Seconds of each micro-batch over all stages, added stage after stage."""
        return tuple(np.cumsum(self.works, axis=0)[-1].tolist())

    def stage_work(self, stage: int) -> tuple[float, ...]:
        """Seconds of forward and backward on one stage, for each micro-batch."""
        return tuple(self.works[stage].tolist())

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        num_micro_batches: int,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        transfer: float = 0.0,
        activation: float = 1.0,
        reduce: Sequence[float] = (),
        update: Sequence[float] = (),
    ) -> OpCosts:
        """The same cost for every stage and micro-batch, as in the textbooks."""

        def table(value: float, rows: int = num_stages) -> Floats:
            return np.full((rows, num_micro_batches), float(value))

        return cls(
            table(forward),
            table(backward_input),
            table(backward_weight),
            table(transfer, num_stages - 1),
            table(activation),
            tuple(reduce),
            tuple(update),
        )

    @classmethod
    def scaled(
        cls,
        stage_sizes: Sequence[float],
        batch_sizes: Sequence[float],
        *,
        transfer: float = 0.0,
        activation: float = 1.0,
    ) -> OpCosts:
        """Forward, input half and weight half each cost ``stage_size * batch_size`` seconds.

        For programs that need an order but no measured costs: stage sizes are the numbers of
        units, batch sizes the tokens. ``transfer`` and ``activation`` are for one token.
        """
        sizes, batches = np.array(stage_sizes, float), np.array(batch_sizes, float)
        table = np.outer(sizes, batches)
        wires = np.tile(transfer * batches, (len(sizes) - 1, 1))
        held = np.outer(activation * sizes, batches)
        return cls(table, table, table, wires, held)
