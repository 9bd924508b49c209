"""The size of the global batch, as a pure function of the samples consumed so far.

Follows ``RampupBatchsizeNumMicroBatchesCalculator`` of megatron-core's
``num_microbatches_calculator.py``, without its assumption that a batch is a whole number of
micro-batches times one data-parallel size: here stages may have different degrees, and
micro-batches different sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Constant size, or a linear ramp-up in steps.

    Attributes:
        final: samples in a global batch after the ramp-up.
        rampup: first size, increment, and samples over which the size grows; ``None``: no ramp-up.

    Raises:
        ValueError: when the steps do not lead from the first size to the final one.
    """

    final: int
    rampup: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.final < 1:
            raise ValueError(f"--global-batch-size must be at least 1, not {self.final}")
        if self.rampup is None:
            return
        start, increment, samples = self.rampup
        if start < 1 or increment < 1 or samples < 0:
            raise ValueError(
                "--rampup-batch-size takes a start and an increment of at least 1 and a number of"
                f" samples, not {start} {increment} {samples}"
            )
        if start > self.final or (self.final - start) % increment:
            raise ValueError(
                f"--rampup-batch-size: steps of {increment} do not lead from {start} to"
                f" --global-batch-size {self.final}; change one of the three"
            )

    def size(self, consumed_samples: int) -> int:
        """Samples in the global batch that starts after ``consumed_samples`` samples."""
        if self.rampup is None:
            return self.final
        start, increment, samples = self.rampup
        steps = (self.final - start) // increment
        if steps == 0 or samples == 0 or consumed_samples > samples:
            return self.final
        # The same floating-point division as in megatron-core, for the same steps.
        return start + int(consumed_samples / (samples / steps)) * increment

    def consumed_samples(self, iteration: int) -> int:
        """Samples consumed by the first ``iteration`` iterations."""
        ramp = self._ramp
        if iteration < len(ramp):
            return ramp[iteration]
        return ramp[-1] + (iteration - len(ramp) + 1) * self.final

    def iterations(self, samples: int) -> int:
        """Number of full batches in ``samples`` samples; a rest is left out.

        As in Megatron's ``update_train_iters``, a batch of the ramp-up that starts within
        ``samples`` counts even if it does not end there.
        """
        ramp = self._ramp
        if samples < ramp[-1]:
            return bisect_right(ramp, samples)
        return len(ramp) - 1 + (samples - ramp[-1]) // self.final

    @cached_property
    def _ramp(self) -> tuple[int, ...]:
        """Samples consumed before each iteration of the ramp-up and before the first after it."""
        consumed = [0]
        if self.rampup is not None:
            while consumed[-1] <= self.rampup[2]:
                consumed.append(consumed[-1] + self.size(consumed[-1]))
        return tuple(consumed)
