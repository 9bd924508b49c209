"""Conversations: one document each, of which every second sequence counts in the loss.

``tools/preprocess_data.py`` writes them (:mod:`megatron_flex.data.chat_encode`). So lengths *and*
the number of targets are known from the index alone, and so is where a conversation may be cut.
"""

from __future__ import annotations

import numpy as np

from megatron_flex.data.documents import Documents
from megatron_flex.data.errors import DataError
from megatron_flex.data.keyed import IntArray
from megatron_flex.data.samples import Overlong, Row, select

_PIECE = 1 << 18  # documents looked at a time: bounds scratch memory
_NONE = np.iinfo(np.int64).max


class ChatSamples:
    """Samples ``t`` up to the last token that counts: inputs ``t[:-1]``, labels ``t[1:]``.

    The loss mask is one where the label counts (the very first token of a sample is never a label).
    Arguments and errors as :class:`megatron_flex.data.gpt.GptSamples`; truncation cuts after the
    last turn that counts and ends within ``max_length``, and a conversation without such a turn has
    no target. ``Overlong.SPLIT`` is refused: later parts would answer to nothing.
    """

    num_losses = 1

    def __init__(
        self,
        documents: Documents,
        start: int = 0,
        stop: int | None = None,
        *,
        max_length: int | None = None,
        overlong: Overlong = Overlong.TRUNCATE,
    ) -> None:
        if overlong is Overlong.SPLIT:
            raise DataError("--overlong split is not for conversations: choose truncate or drop")
        self._documents = documents
        cut = max_length is not None and overlong is Overlong.TRUNCATE
        self._limit = max_length if cut and max_length is not None else _NONE
        stop = documents.num_documents if stop is None else stop
        if not np.any(self._upto(np.arange(start, stop, dtype=np.int64), _NONE)[1]):
            raise DataError(
                f"data set '{documents.name}' has no token that the loss would be on: conversations"
                " are written by tools/preprocess_data.py --sample-format chat, into"
                " {prefix}_chat_document"
            )
        self.selection = select(
            documents.name, start, stop, self._measure, max_length, overlong,
            divide=None, may_lose_targets=cut,
            remaining=lambda documents: self._upto(documents, self._limit)[0],
        )  # fmt: skip

    def lengths(self, index: IntArray) -> IntArray:
        """Input tokens of each sample, ``[n]`` int64."""
        return self._upto(self.selection.documents(index), self._limit)[0]

    def loss_tokens(self, index: IntArray) -> IntArray:
        """Tokens that count and are labels, ``[n, 1]`` int64."""
        return self._upto(self.selection.documents(index), self._limit)[1][:, None]

    def read(
        self, index: int, number: int, start: int, stop: int, *, inputs: bool, targets: bool
    ) -> Row:
        """Tokens ``[start, stop)`` of a sample and their targets (``number`` plays no part)."""
        document = int(self.selection.documents(np.array([index]))[0])
        if not targets:
            return Row(tokens=self._documents.read(document, start, stop) if inputs else None)
        tokens = self._documents.read(document, start, stop + 1)
        ends = np.cumsum(self._documents.sentences(document))
        # A token is of the first sequence that ends after it.
        sequence = np.searchsorted(ends, np.arange(start + 1, stop + 1), side="right")
        return Row(
            tokens=tokens[:-1] if inputs else None,
            labels=tokens[1:],
            loss_mask=(sequence % 2 == 1).astype(np.float32),
        )

    def _measure(self, documents: IntArray) -> tuple[IntArray, IntArray]:
        return self._upto(documents, _NONE)[0], self._upto(documents, self._limit)[1]

    def _upto(self, documents: IntArray, limit: int) -> tuple[IntArray, IntArray]:
        """For each document, cut after the last sequence that counts and ends within ``limit``
        input tokens: its input tokens (0 without one), and its labels that count."""
        pieces = [
            self._piece(documents[i : i + _PIECE], limit) for i in range(0, len(documents), _PIECE)
        ]
        if not pieces:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        inputs, labels = zip(*pieces, strict=True)
        return np.concatenate(inputs), np.concatenate(labels)

    def _piece(self, documents: IntArray, limit: int) -> tuple[IntArray, IntArray]:
        lengths = self._documents.sequence_lengths(documents)
        counts = self._documents.num_sentences(documents)
        first = np.cumsum(counts) - counts  # sequences before each document
        where = np.repeat(np.arange(len(documents)), counts)
        starts = np.cumsum(lengths) - lengths
        if len(lengths):
            starts -= np.repeat(starts[np.minimum(first, len(lengths) - 1)], counts)
        ends = starts + lengths
        odd = (np.arange(len(lengths)) - np.repeat(first, counts)) % 2 == 1
        chosen = np.flatnonzero(odd & (lengths > 0) & (ends - 1 <= limit))
        inputs = np.zeros(len(documents), dtype=np.int64)
        inputs[where[chosen]] = ends[chosen] - 1  # of several the last one stays
        # The first token of all is no label.
        labels = lengths[chosen] - (starts[chosen] == 0)
        found = np.bincount(where[chosen], weights=labels, minlength=len(documents))
        return inputs, found.astype(np.int64)
