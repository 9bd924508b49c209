"""What every operation of an iteration costs: the input of the simulator.

Times are seconds, sizes are bytes; a list index is the stage, then the micro-batch. The numbers
come from the planner's cost model (or from a test); nothing here knows devices or links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Table = tuple[tuple[float, ...], ...]
TABLES = (
    "forward", "backward_input", "backward_weight", "transfer", "activation", "chain_bytes"
)  # fmt: skip
"""Costs that are given for each stage (or boundary) and micro-batch."""


@dataclass(frozen=True)
class OpCosts:
    """Costs of one iteration on one plan.

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
            gradients. Empty: none.
    """

    forward: Table
    backward_input: Table
    backward_weight: Table
    transfer: Table
    activation: Table
    reduce: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    chain_bytes: Table = ()

    def __post_init__(self) -> None:
        stages, batches = len(self.forward), len(self.forward[0]) if self.forward else 0
        if not stages or not batches:
            raise ValueError("costs need at least one stage and one micro-batch")
        for name in TABLES:
            table: Table = getattr(self, name)
            rows = stages - 1 if name == "transfer" else stages
            if name == "chain_bytes" and not table:
                continue
            if len(table) != rows or any(len(row) != batches for row in table):
                raise ValueError(
                    f"costs.{name} must have {rows} rows of {batches} micro-batches, as"
                    " costs.forward implies"
                )
        for name in (*TABLES, "reduce", "update"):
            value = getattr(self, name)
            rows_ = value if value and isinstance(value[0], tuple) else (value,)
            for number, row in enumerate(rows_):
                # This keeps it cheap; NaN fails the comparison.
                if row and not (min(row) >= 0 and 0 <= sum(row) < math.inf):
                    raise ValueError(
                        f"costs.{name}, row {number}: costs must be finite and not negative"
                    )

    @cached_property
    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """The tables as arrays, by name: ``[stages, micro_batches]`` (transfer: one row less)."""
        shape = (-1, self.num_micro_batches)
        found: dict[str, NDArray[np.float64]] = {
            name: np.array(getattr(self, name), float).reshape(shape) for name in TABLES
        }
        if not self.chain_bytes:
            found["chain_bytes"] = np.zeros_like(found["activation"])
        return found

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches."""
        return len(self.forward[0])

    @cached_property
    def works(self) -> NDArray[np.float64]:
        """``[stages, micro_batches]``: forward and backward, seconds."""
        tables = self.arrays
        found: NDArray[np.float64] = tables["forward"] + tables["backward_input"]
        return found + tables["backward_weight"]

    @cached_property
    def totals(self) -> tuple[float, ...]:
        """Seconds of each micro-batch over all stages, added stage after stage."""
        return tuple(np.cumsum(self.works, axis=0)[-1].tolist())

    def work(self, stage: int, micro_batch: int) -> float:
        """Seconds of forward and backward of one micro-batch on one stage."""
        return (
            self.forward[stage][micro_batch]
            + self.backward_input[stage][micro_batch]
            + self.backward_weight[stage][micro_batch]
        )

    def stage_work(self, stage: int) -> tuple[float, ...]:
        """Seconds of forward and backward on one stage, for each micro-batch."""
        return tuple(self.works[stage].tolist())

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, NDArray[np.float64]],
        reduce: tuple[float, ...] = (),
        update: tuple[float, ...] = (),
    ) -> OpCosts:
        """From the tables as arrays, by name; ``chain_bytes`` may be left out."""
        tables = {name: tuple(map(tuple, arrays[name].tolist())) for name in arrays}
        found = cls(**tables, reduce=reduce, update=update)
        kept = dict(arrays)
        if "chain_bytes" not in kept:
            kept["chain_bytes"] = np.zeros_like(kept["activation"])
        found.__dict__["arrays"] = kept  # where the cached property keeps them
        return found

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

        def table(value: float, rows: int = num_stages) -> Table:
            return ((float(value),) * num_micro_batches,) * rows

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
        reduce: Sequence[float] = (),
        update: Sequence[float] = (),
    ) -> OpCosts:
        """Forward, input half and weight half each cost ``stage_size * batch_size`` seconds.

        For programs that need an order but no measured costs: stage sizes are the numbers of
        units, batch sizes the tokens. ``transfer`` and ``activation`` are for one token.
        """
        table = tuple(tuple(float(s * b) for b in batch_sizes) for s in stage_sizes)
        wires = tuple(float(transfer * b) for b in batch_sizes)
        held = tuple(tuple(float(activation * s * b) for b in batch_sizes) for s in stage_sizes)
        return cls(
            table, table, table, (wires,) * (len(stage_sizes) - 1), held, tuple(reduce),
            tuple(update),
        )  # fmt: skip
