"""Micro-batches of slices for the tests, and a model run over them as a stage would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from megatron_flex.data.microbatch import Slice
from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.block import Block
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.model.prefix import PrefixStore
from megatron_flex.model.tape import Tape, recording
from megatron_flex.runtime.recompute import recomputed
from tests.unit.model.support import make_batch


def sliced(sample: int, length: int, tokens: int) -> list[Slice]:
    """A sample in slices of so many tokens; the last takes the rest."""
    stops = [*range(tokens, length, tokens), length]
    return [Slice(sample, a, b, length) for a, b in zip([0, *stops], stops, strict=False)]


def two_chains(lengths: Sequence[int], tokens: int) -> list[list[Slice]]:
    """Micro-batches: the first two samples in slices by turns, the others beside some of them."""
    a, b = (sliced(sample, lengths[sample], tokens) for sample in (0, 1))
    parts = [[s] for pair in zip_longest(a, b) for s in pair if s is not None]
    for sample in range(2, len(lengths)):
        parts[(3 * sample) % len(parts)].append(Slice.all_of(sample, lengths[sample]))
    return parts


def packed(
    parts: Sequence[Slice], config: ModelConfig, seed: int = 0, spoilt: Sequence[int] = ()
) -> PackedBatch:
    """The tensors of a micro-batch; those of ``spoilt`` samples are other ones."""
    found = []
    for part in parts:
        other = seed + 1000 if part.sample in spoilt else seed
        whole = make_batch([part.length], config, seed=other, samples=[part.sample])
        rows = slice(part.start, part.stop)
        found.append(
            [t[rows] for t in (whole.tokens, whole.labels, whole.loss_mask) if t is not None]
        )
    tokens, labels, mask = (torch.cat(column) for column in zip(*found, strict=True))
    return PackedBatch(
        tuple(p.tokens for p in parts), tuple(p.sample for p in parts),
        tuple(p.start for p in parts), tokens, labels, mask,
        totals=tuple(p.length for p in parts),
    )  # fmt: skip


@dataclass
class Found:
    """What a model gave.

    Sums of losses; of each sample the rows of the head's input and of the gradient of the first
    layer's input; gradients of parameters by name.
    """

    losses: torch.Tensor
    states: dict[int, torch.Tensor]
    inputs: dict[int, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def train(
    blocks: Sequence[Block],
    micro_batches: Sequence[PackedBatch],
    *,
    again: bool = False,
    split: bool = False,
    store: PrefixStore | None = None,
    order: Sequence[int] | None = None,
) -> Found:
    """Forward of all micro-batches, then backward in reverse (or in ``order``)."""
    for block in blocks:
        for parameter in block.parameters():
            if parameter.dtype is not torch.float32:
                parameter.grad_dtype = torch.float32
            parameter.grad = torch.zeros(parameter.shape, device=parameter.device)
    store = store or PrefixStore(training=True)
    losses, states, leaves, outputs, tapes = [], [], [], [], []
    batches = [replace(b, prefixes=store) for b in micro_batches]
    for number, batch in enumerate(batches):
        store.forward(0, number, batch)
        tape = Tape() if split else None
        tapes.append(tape)
        with recording(tape):
            embedded = blocks[0](None, batch)
            hidden = leaf = embedded
            leaf.retain_grad()
            for block in blocks[1:]:
                if block.unit.kind is Kind.HEAD:
                    states.append(hidden.detach())
                repeat = again and block.unit.kind is not Kind.HEAD
                hidden = recomputed(block, hidden, batch) if repeat else block(hidden, batch)
        losses.append(hidden.detach().double())
        leaves.append(leaf)
        outputs.append(hidden)
    for number in order or reversed(range(len(batches))):
        store.backward(0, number, batches[number])
        outputs[number].sum().backward()
    for tape in tapes:
        if tape is not None:
            tape.run()
    store.finish()
    gradients = []
    for leaf in leaves:
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    named = {
        name: parameter.grad
        for block in blocks
        for parameters in block.slab_parameters().values()
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    return Found(
        torch.stack(losses).sum(0), _by_sample(batches, states), _by_sample(batches, gradients),
        {name: gradient.clone() for name, gradient in named.items()},
    )  # fmt: skip


def _by_sample(
    batches: Sequence[PackedBatch], tensors: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    found: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for batch, tensor in zip(batches, tensors, strict=True):
        parts = tensor.split(batch.lengths)
        for sample, start, part in zip(batch.samples, batch.starts, parts, strict=True):
            found.setdefault(sample, []).append((start, part))
    rows = {s: sorted(p, key=lambda x: x[0]) for s, p in found.items()}
    return {s: torch.cat([part for _, part in parts]) for s, parts in rows.items()}
