"""Keys and values of samples that are cut to slices, kept from slice to slice of one run.

The slices of a sample go through a stage one after the other. Each attention unit keeps the keys
and values of the whole sample from the forward of its first slice on: a slice writes its own rows
and attends to all up to them. Backward goes the other way: each slice adds to the gradients of the
rows up to its end, of which its own are complete then, for all later slices have been.

The store is an object of the run, reached through the micro-batch. Nothing of it is saved by
autograd, which would object to rows that are written later.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_flex.data.microbatch import Slice
from megatron_flex.data.packed import PackedBatch

Tables = tuple[Tensor, Tensor]
"""Cosine and sine, ``[tokens, rotary dimensions / 2]``."""


class Prefix:
    """What one attention unit keeps of one sample.

    Attributes:
        keys, values: ``[tokens, groups, d]``, rows up to ``written`` are there.
        gradients: of both, float32 sums in the kernel's own layout; ``None`` before the first
            backward.
        complete: rows from here on have gone back.
    """

    def __init__(self, tokens: int, like: Tensor) -> None:
        """``like`` has the groups, head size, type and device."""
        self.keys = like.new_empty(tokens, *like.shape[1:])
        self.values = torch.empty_like(self.keys)
        self.written = 0
        self.gradients: tuple[Tensor, Tensor] | None = None
        self.complete = tokens

    def sums(self, *shape: int) -> tuple[Tensor, Tensor]:
        """The gradients, from the first backward on; zeros of ``shape`` at first."""
        if self.gradients is None:
            make = torch.zeros
            device = self.keys.device
            self.gradients = make(shape, device=device), make(shape, device=device)
        return self.gradients


class PrefixStore:
    """The keys and values that one worker keeps in one run.

    It also sees to the order: on every stage the slices of a sample go forward one after the other,
    and back in reverse.
    """

    def __init__(self, *, training: bool) -> None:
        """Without ``training`` nothing is kept for a backward."""
        self._training = training
        self._prefixes: dict[tuple[int, int], Prefix] = {}
        self._tables: dict[int, Tables] = {}
        # Of each stage and sample: tokens that have gone forward, and those that must come back.
        self._forward: dict[tuple[int, int], int] = {}
        self._back: dict[tuple[int, int], int] = {}

    # ---- of units ----------------------------------------------------------------------------

    def write(self, unit: int, cut: Slice, keys: Tensor, values: Tensor) -> Prefix:
        """Put a slice's rows in their place, ``[T, groups, d]`` each, before it attends.

        A recomputed unit comes twice: its rows are there then.
        """
        key = unit, cut.sample
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = self._prefixes[key] = Prefix(cut.length, keys)
        if cut.start > prefix.written:
            raise RuntimeError(
                f"{_name(cut)} attends to keys that attention unit {unit} does not have: its slices"
                f" are there up to token {prefix.written}"
            )
        if cut.stop > prefix.written:
            prefix.keys[cut.start : cut.stop] = keys
            prefix.values[cut.start : cut.stop] = values
            prefix.written = cut.stop
        return prefix

    def attended(self, unit: int, cut: Slice) -> None:
        """A slice has attended; where there is no backward, the last one's keys may go."""
        if not self._training and cut.stop == cut.length:
            self._free(unit, cut.sample)

    def going_back(self, unit: int, cut: Slice) -> Prefix:
        """What a slice's backward attends to again, and adds gradients to."""
        prefix = self._prefixes.get((unit, cut.sample))
        if prefix is None or prefix.complete != cut.stop:
            raise RuntimeError(
                f"backward of {_name(cut)} in attention unit {unit} before that of the slice after"
                " it"
            )
        return prefix

    def gone_back(self, unit: int, cut: Slice) -> None:
        """A slice's rows of gradients are read; after those of the first all may go."""
        self._prefixes[unit, cut.sample].complete = cut.start
        if cut.start == 0:
            self._free(unit, cut.sample)

    def tables(self, sample: int, make: Callable[[], Tables]) -> Tables:
        """Rotary tables of a whole sample, made once for all units."""
        if sample not in self._tables:
            self._tables[sample] = make()
        return self._tables[sample]

    def holds(self, address: int) -> bool:
        """Whether memory that begins there is the store's."""
        return any(
            address in (p.keys.data_ptr(), p.values.data_ptr()) for p in self._prefixes.values()
        )

    def _free(self, unit: int, sample: int) -> None:
        del self._prefixes[unit, sample]
        if all(other != sample for _, other in self._prefixes):
            self._tables.pop(sample, None)

    # ---- of stages ---------------------------------------------------------------------------

    def forward(self, stage: int, micro_batch: int, batch: PackedBatch) -> None:
        """Check that a stage's forward of a micro-batch is the next one of the sample that it cuts.

        Raises ``RuntimeError`` that names stage, micro-batch and sample.
        """
        cut = batch.cut
        if cut is None:
            return
        key = stage, cut.sample
        done = self._forward.get(key, 0)
        if cut.start != done:
            raise RuntimeError(
                f"stage {stage}, micro-batch {micro_batch}: forward of {_name(cut)}, of which"
                f" {done} tokens have gone forward"
            )
        self._forward[key] = cut.stop
        if cut.stop == cut.length:
            del self._forward[key]
            if self._training:
                self._back[key] = cut.length

    def backward(self, stage: int, micro_batch: int, batch: PackedBatch) -> None:
        """Check that a stage's backward is of the last slice that has not gone back."""
        cut = batch.cut
        if cut is None:
            return
        key = stage, cut.sample
        left = self._back.get(key)
        if left != cut.stop:
            wait = "not all slices have gone forward" if left is None else f"{left} tokens are left"
            raise RuntimeError(
                f"stage {stage}, micro-batch {micro_batch}: backward of {_name(cut)}, of which"
                f" {wait}"
            )
        self._back[key] = cut.start
        if cut.start == 0:
            del self._back[key]

    def finish(self) -> None:
        """The run has ended: raise ``RuntimeError`` if a sample has not gone all its way."""
        for what, left in (("forward", self._forward), ("backward", self._back)):
            for stage, sample in left:
                raise RuntimeError(f"stage {stage}: not all slices of sample {sample} ran {what}")
        for unit, sample in self._prefixes:
            raise RuntimeError(f"attention unit {unit} still has the keys of sample {sample}")


def _name(cut: Slice) -> str:
    return f"tokens {cut.start} to {cut.stop} of sample {cut.sample} ({cut.length} tokens)"
