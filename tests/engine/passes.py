"""Forwards and first halves of backwards of a whole model in slabs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_flex.model.tape import Tape, recording
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.recompute import recomputed
from tests.unit.model.support import make_batch


def half_trained(
    held: Holdings,
    lengths: Sequence[tuple[int, ...]],
    device: torch.device,
    *,
    split: bool,
    again: bool,
) -> tuple[list[torch.Tensor], list[Tape]]:
    """Losses of several micro-batches, after their backwards.

    Args:
        split: weights' gradients are left to the tapes that are returned.
        again: passes of layers are recomputed.
    """
    blocks = [held.blocks[u.index] for u in held.config.layers.units]
    losses, tapes = [], []
    for seed, one in enumerate(lengths):
        batch = make_batch(one, held.config, seed=seed)
        tail = -batch.num_tokens % held.config.alignment
        batch = (batch.with_tail(tail) if tail else batch).to(device)
        tape = Tape() if split else None
        hidden: torch.Tensor | None = None
        for block in blocks:
            if again and hidden is not None and block is not blocks[-1]:
                hidden = recomputed(block, hidden, batch)
                continue
            with recording(tape):
                hidden = block(hidden, batch)
        assert hidden is not None
        hidden.sum().backward()
        losses.append(hidden.detach())
        if tape is not None:
            tapes.append(tape)
    return losses, tapes
