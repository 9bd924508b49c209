"""Slabs of any shape, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from megatron_flex.model.block import decays
from megatron_flex.runtime.slab import Buffers, Slab, SlabLayout

CPU = torch.device("cpu")

#: Weights (decayed) and biases or norm weights (not decayed), in any order.
SHAPES = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 40)) | st.tuples(st.integers(1, 70)),
    max_size=7,
).map(lambda shapes: [(f"p{i}.weight", torch.Size(s)) for i, s in enumerate(shapes)])


def layout_of(shapes: Sequence[tuple[str, torch.Size]]) -> SlabLayout:
    """The layout under Megatron's rule of decay."""
    return SlabLayout.of(shapes, decays)


def make_slab(
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    seed: int = 0,
) -> Slab:
    """A slab with random weights, moments and gradients; parameters are ``p0``, ``p1``, ..."""
    layout = layout_of([(f"p{i}", torch.Size(s)) for i, s in enumerate(shapes)])
    slab = Slab(3, layout, Buffers.allocate(layout.numel, dtype, CPU, exact))
    generator = torch.Generator().manual_seed(seed)
    for entry in layout.entries:
        for buffer in (slab.master, slab.exp_avg, slab.grads):
            slab.view(buffer, entry).normal_(generator=generator)
        slab.view(slab.exp_avg_sq, entry).uniform_(0.1, 1.0, generator=generator)
    slab.params_from_masters()
    return slab
