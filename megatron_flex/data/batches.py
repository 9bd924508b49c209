"""Global batches: their composition from the index alone, their tokens where they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron_flex.data.errors import DataError
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.keyed import IntArray
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.data.order import Order
from megatron_flex.data.packed import PackedBatch
from megatron_flex.data.samples import Row, Samples

_PIECE = 1 << 22  # samples looked at at a time: bounds scratch memory


class BatchSource:
    """Samples of one split in training order; every process holds an equal one.

    Args:
        sets: the sets of samples that are mixed, usually one.
        order: maps consumed-sample numbers to them; it must have been made for these sets.
    """

    def __init__(self, sets: Sequence[Samples], order: Order) -> None:
        if len({s.num_losses for s in sets}) != 1:
            raise DataError("sets of samples that are mixed must have the same losses")
        self._sets = tuple(sets)
        self._order = order

    @property
    def sets(self) -> tuple[Samples, ...]:
        """The sets of samples; ``sets[i].selection.counts`` says what was skipped in each."""
        return self._sets

    @property
    def num_samples(self) -> int | None:
        """How many samples there are in all; ``None`` when epochs repeat for ever."""
        return self._order.num_samples

    def all_lengths(self) -> Iterator[IntArray]:
        """Input tokens of every sample, in the order of the data, some million at a time."""
        for samples in self._sets:
            size = samples.selection.size
            for start in range(0, size, _PIECE):
                yield samples.lengths(np.arange(start, min(size, start + _PIECE), dtype=np.int64))

    def batch(self, first_sample: int, size: int) -> GlobalBatch:
        """The batch of ``size`` samples from ``first_sample`` on; reads no tokens.

        A source that does not repeat gives fewer at its end.

        Raises:
            DataError: a source that does not repeat has no sample ``first_sample``.
        """
        end = first_sample + size
        if self.num_samples is not None:
            end = min(end, self.num_samples)
        if not 0 <= first_sample < end:
            raise DataError(
                f"no samples {first_sample} to {first_sample + size}: there are"
                f" {self.num_samples if self.num_samples is not None else 'endless'} samples"
            )
        which, index = self._order.locate(np.arange(first_sample, end, dtype=np.int64))
        lengths = np.empty(end - first_sample, dtype=np.int64)
        targets = np.zeros(self._sets[0].num_losses, dtype=np.int64)
        for number in np.unique(which):
            here = which == number
            lengths[here] = self._sets[number].lengths(index[here])
            targets += self._sets[number].loss_tokens(index[here]).sum(axis=0)
        lengths.flags.writeable = False
        return GlobalBatch(first_sample, lengths, tuple(int(t) for t in targets))

    def packed(self, micro_batch: MicroBatch, *, inputs: bool, targets: bool) -> PackedBatch:
        """The tensors of a micro-batch.

        Args:
            inputs: read the input tokens (where the embedding runs).
            targets: read labels and loss mask (where the head runs). With neither, only shapes
                are filled in and nothing is read.

        Raises:
            DataError: a token is outside the vocabulary.
        """
        slices = micro_batch.slices
        rows: list[Row] = []
        if inputs or targets:
            numbers = np.array([s.sample for s in slices], dtype=np.int64)
            which, index = self._order.locate(numbers)
            rows = [
                self._sets[w].read(i, s.sample, s.start, s.stop, inputs=inputs, targets=targets)
                for w, i, s in zip(which.tolist(), index.tolist(), slices, strict=True)
            ]
        order = [row.sentence_order for row in rows if row.sentence_order is not None]
        packed = PackedBatch(
            lengths=tuple(s.tokens for s in slices),
            samples=tuple(s.sample for s in slices),
            starts=tuple(s.start for s in slices),
            totals=tuple(s.length for s in slices),
            tokens=_join([row.tokens for row in rows]),
            labels=_join([row.labels for row in rows]),
            loss_mask=_join([row.loss_mask for row in rows]),
            token_types=_join([row.token_types for row in rows]),
            sentence_order=torch.tensor(order, dtype=torch.int64) if order else None,
        )
        if micro_batch.tail:
            return packed.with_tail(micro_batch.tail)
        return packed.padded(micro_batch.padded) if micro_batch.padded else packed


def _join(parts: Sequence[np.ndarray | None]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.from_numpy(np.concatenate(present)) if present else None
