"""Exact sums of gradients: the same bits under any plan (``--flexpipe-bitwise``).

After each backward the float32 gradient of each unit (after each half of a split one the part that
is complete then) is rounded to a multiple of ``2**-BITS`` and
added to an int64 sum. Integer addition has no rounding, so neither the order of micro-batches nor
the number of replicas matters. The sum is turned back to float32 once, after the reduction.
"""

from __future__ import annotations

import torch

from megatron_flex import native
from megatron_flex.runtime.slab import Slab
from megatron_flex.schedule.shards import Range

BITS = 44
"""Gradients are multiples of 2**-44 (5.7e-14); one contribution must be below 2**7 = 128."""


class GradientOverflowError(ArithmeticError):
    """A gradient is too large for its fixed-point form."""


def accumulate(slab: Slab, unit: int, part: Range | None = None) -> bool:
    """Add one unit's gradient (elements ``part`` of it) to the slab's sum and clear it.

    Returns whether all of it was finite; if not, the sum is of no use. Raises
    :class:`GradientOverflowError` for a finite gradient that is too large.
    """
    assert slab.sums is not None, "the slab has no exact sums"
    start, stop = (0, slab.layout.numel) if part is None else part
    grads, sums = slab.scratch(unit)[start:stop], slab.sums[start:stop]
    if grads.device.type == "cpu":
        verdict = native.function("mflex_fixed_accumulate")(
            grads.data_ptr(), sums.data_ptr(), grads.numel(), BITS, torch.get_num_threads()
        )
        finite, fits = verdict != 2, verdict == 0
    else:
        scaled = grads.double() * 2.0**BITS
        finite = bool(scaled.isfinite().all())
        fits = bool((scaled.abs() < 2.0**51).all())
        sums += scaled.round().to(torch.int64)
        grads.zero_()
    if finite and not fits:
        raise GradientOverflowError(
            f"a gradient of unit {unit} is {2.0 ** (51 - BITS):g} or larger, too large for the"
            " exact sums of --flexpipe-bitwise: lower --lr or lengthen the warm-up, or train"
            " without --flexpipe-bitwise"
        )
    return finite


def finish(slab: Slab) -> None:
    """Turn the reduced sum into the float32 gradient and clear the sum."""
    sums, grads = slab.sums, slab.grads
    assert sums is not None, "the slab has no exact sums"
    if grads.device.type == "cpu":
        native.function("mflex_fixed_finish")(
            sums.data_ptr(), grads.data_ptr(), grads.numel(), BITS, torch.get_num_threads()
        )
        return
    grads.copy_(sums.double() * 2.0**-BITS)
    sums.zero_()
