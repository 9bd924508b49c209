"""Documents in Megatron's ``.bin``/``.idx`` files, read through megatron-core."""

from __future__ import annotations

import numpy as np

from megatron_flex.data.errors import DataError
from megatron_flex.data.index_check import check_index
from megatron_flex.data.keyed import IntArray
from megatron_flex.imports import quick_import

with quick_import():
    from megatron.core.datasets.indexed_dataset import IndexedDataset

_PROBE = 1 << 16  # tokens at each end that are looked at when a data set is opened


class IndexedDocuments:
    """The documents of ``prefix.bin`` and ``prefix.idx``; a document's sequences are joined.

    Nothing is copied at start: the index stays mapped, so 30 million documents open in about a
    second. Every array that leaves this class is a copy: an array of an ``IndexedDataset`` that
    outlives it points into unmapped memory, and reading it kills the process.

    Args:
        prefix: path without ``.bin``/``.idx``, as in ``--data-path``.
        vocab_size: tokens must be below it; ``None`` when there is no tokenizer to compare with.
        mmap: map the ``.bin`` too (``--no-mmap-bin-files`` reads it with ordinary reads).

    Raises:
        DataError: files missing, corrupt or empty, or tokens outside the vocabulary.
    """

    def __init__(self, prefix: str, vocab_size: int | None = None, *, mmap: bool = True) -> None:
        self._info = check_index(prefix)
        self._prefix = prefix
        self._vocab_size = vocab_size
        self._dataset = IndexedDataset(prefix, mmap=mmap)
        self._itemsize = np.dtype(self._info.dtype).itemsize
        tokens = self._info.size // self._itemsize
        for start in {0, max(0, tokens - _PROBE)}:
            self._read(start, min(_PROBE, tokens - start))

    @property
    def name(self) -> str:
        """The path prefix."""
        return self._prefix

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return self._info.num_documents

    def lengths(self, documents: IntArray) -> IntArray:
        """Tokens of each document, ``[n]`` int64."""
        borders = self._dataset.document_indices
        return self._offsets(borders[documents + 1]) - self._offsets(borders[documents])

    def num_sentences(self, documents: IntArray) -> IntArray:
        """Sequences of each document, ``[n]`` int64."""
        borders = self._dataset.document_indices
        result: IntArray = borders[documents + 1] - borders[documents]
        return result

    def sequence_lengths(self, documents: IntArray) -> IntArray:
        """Tokens of each sequence of all these documents, one after the other, int64."""
        counts = self.num_sentences(documents)
        before = np.cumsum(counts) - counts
        places = np.arange(int(counts.sum()), dtype=np.int64)
        places += np.repeat(self._dataset.document_indices[documents] - before, counts)
        return self._dataset.sequence_lengths[places].astype(np.int64)

    def sentences(self, document: int) -> IntArray:
        """Tokens of each sequence of one document, int64."""
        first, last = self._dataset.document_indices[document : document + 2]
        return self._dataset.sequence_lengths[first:last].astype(np.int64)

    def read(self, document: int, start: int, stop: int) -> IntArray:
        """Tokens ``[start, stop)`` of a document, int64; a copy.

        Raises:
            DataError: a token is negative or not below ``vocab_size``.
        """
        first = self._offsets(self._dataset.document_indices[document : document + 1])
        return self._read(int(first[0]) + start, stop - start)

    def _offsets(self, sequences: IntArray) -> IntArray:
        """Token offset of each sequence in the ``.bin``; the end for the one after the last."""
        pointers = self._dataset.index.sequence_pointers
        inside = sequences < self._info.num_sequences
        offsets = np.where(inside, pointers[np.where(inside, sequences, 0)], self._info.size)
        result: IntArray = offsets // self._itemsize
        return result

    def _read(self, offset: int, count: int) -> IntArray:
        if count == 0:
            return np.empty(0, dtype=np.int64)
        tokens = self._dataset.bin_reader.read(
            dtype=self._info.dtype, count=count, offset=offset * self._itemsize
        ).astype(np.int64)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or (self._vocab_size is not None and high >= self._vocab_size):
            bad = low if low < 0 else high
            place = offset + int(np.flatnonzero(tokens == bad)[0])
            raise DataError(
                f"{self._prefix}.bin: token id {bad} (token {place} of the file,"
                f" {self._document_of(place)}) is outside the vocabulary of"
                f" {self._vocab_size} tokens: this file was written with another tokenizer; use"
                " the same --tokenizer-type and --tokenizer-model, or set --vocab-size"
            )
        return tokens

    def _document_of(self, offset: int) -> str:
        """Names the document of a token offset (binary search, for the error message)."""
        pointers = self._dataset.index.sequence_pointers
        sequence = np.searchsorted(pointers, offset * self._itemsize, side="right") - 1
        borders = self._dataset.document_indices
        return f"document {int(np.searchsorted(borders, sequence, side='right')) - 1}"
