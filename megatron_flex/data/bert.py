"""BERT samples: one document each, masked tokens and, if wanted, the order of two segments."""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron_flex.data.documents import Documents
from megatron_flex.data.errors import DataError
from megatron_flex.data.keyed import IntArray, below, bits, derive
from megatron_flex.data.masking import BertVocabulary, choose, mask_counts, replace
from megatron_flex.data.samples import Overlong, Row, select

_LEAST = 4  # tokens that a sample must have room for where documents are divided: each has two then
_PURPOSE = 5  # keeps this use of the seed apart from all others


class BertSamples:
    """Documents ``[start, stop)`` as ``[CLS] text [SEP]`` or ``[CLS] A [SEP] B [SEP]``.

    As megatron-core's ``BERTMaskedWordPieceDataset``: with ``binary_head`` the sentences of a
    document are split at random into A and B, which are swapped half of the time
    (``sentence_order`` 1); what exceeds ``max_length`` is cut from the longer segment, at random
    at its front or its end. With ``Overlong.SPLIT`` a document is divided evenly into as many
    samples as it needs; where one of them has no border between sentences, A and B part anywhere.
    All draws are keyed by (seed, consumed-sample number), so an epoch
    masks anew and every process draws alike. Lengths and numbers of targets need no tokens.

    Args:
        documents: written with ``--split-sentences`` where ``binary_head`` is wanted.
        vocabulary: special tokens.
        seed: ``--seed``.
        binary_head: sentence-order target; documents of one sentence are skipped then.
        mask_prob: share of masked tokens (``--mask-prob``).
        start, stop, max_length, overlong: as :class:`megatron_flex.data.gpt.GptSamples`;
            lengths include the special tokens.
    """

    def __init__(
        self,
        documents: Documents,
        vocabulary: BertVocabulary,
        seed: int,
        *,
        binary_head: bool = True,
        mask_prob: float = 0.15,
        start: int = 0,
        stop: int | None = None,
        max_length: int | None = None,
        overlong: Overlong = Overlong.TRUNCATE,
    ) -> None:
        self._documents, self._vocabulary, self._seed = documents, vocabulary, seed
        self._binary_head, self._mask_prob = binary_head, mask_prob
        self._specials = 3 if binary_head else 2
        if not 0 < mask_prob < 1:
            raise DataError(f"--mask-prob must be between 0 and 1, not {mask_prob}")
        self._limit = np.iinfo(np.int64).max if max_length is None else max_length
        stop = documents.num_documents if stop is None else stop
        self._split = overlong is Overlong.SPLIT
        least = self._specials + (_LEAST if self._split else 1)
        if max_length is not None and max_length < least:
            raise DataError(
                f"--max-sample-length {max_length} leaves no room for text beside"
                f" {self._specials} special tokens"
            )
        self.selection = select(
            documents.name, start, stop, self._measure, max_length, overlong, divide=self._divide
        )

    @property
    def num_losses(self) -> int:
        """Masked tokens, and the order of segments if wanted."""
        return 2 if self._binary_head else 1

    def lengths(self, index: IntArray) -> IntArray:
        """Tokens of each sample, special ones included, ``[n]`` int64."""
        starts, stops = self._places(index)
        return np.minimum(stops - starts + self._specials, self._limit)

    def loss_tokens(self, index: IntArray) -> IntArray:
        """Masked tokens, and one segment order, of each sample: ``[n, num_losses]`` int64."""
        masked = mask_counts(self.lengths(index), self._specials, self._mask_prob)
        columns = [masked, np.ones_like(masked)][: self.num_losses]
        return np.stack(columns, axis=1)

    def read(
        self, index: int, number: int, start: int, stop: int, *, inputs: bool, targets: bool
    ) -> Row:
        """The whole sample; ``number``, its consumed-sample number, keys all draws.

        Raises:
            DataError: ``[start, stop)`` is not the whole sample: attention goes both ways, so a
                sample cannot be cut to slices.
        """
        document = int(self.selection.documents(np.array([index]))[0])
        key = derive(self._seed, _PURPOSE, number)
        (first,), (last,) = (a.tolist() for a in self._places(np.array([index])))
        segments, swapped = self._segments(document, first, last, key)
        tokens, types, candidates = self._assemble(segments)
        if (start, stop) != (0, len(tokens)):
            raise DataError(f"a BERT sample of {len(tokens)} tokens was cut to [{start}, {stop})")
        vocabulary = self._vocabulary
        count = mask_counts(np.array([len(tokens)]), self._specials, self._mask_prob)
        masked = choose(tokens, candidates, int(count[0]), key, vocabulary.continuation)
        row = Row()
        if inputs:
            row = Row(
                tokens=replace(tokens, masked, key, vocabulary),
                token_types=types if self._binary_head else None,
            )
        if targets:
            labels = np.zeros_like(tokens)
            labels[masked] = tokens[masked]
            loss_mask = np.zeros(len(tokens), dtype=np.float32)
            loss_mask[masked] = 1
            order = int(swapped) if self._binary_head else None
            row = dataclasses.replace(row, labels=labels, loss_mask=loss_mask, sentence_order=order)
        return row

    def _measure(self, documents: IntArray) -> tuple[IntArray, IntArray]:
        tokens = self._documents.lengths(documents)
        useful = tokens > 0
        if self._binary_head:
            useful &= self._documents.num_sentences(documents) > 1
        return tokens + self._specials, useful.astype(np.int64)

    def _divide(self, documents: IntArray) -> tuple[IntArray, IntArray]:
        tokens = self._documents.lengths(documents)
        return -(-tokens // (self._limit - self._specials)), np.zeros_like(tokens)

    def _places(self, index: IntArray) -> tuple[IntArray, IntArray]:
        """First token of each sample in its document, and one after the last; before it is cut."""
        documents = self.selection.documents(index)
        tokens = self._documents.lengths(documents)
        if not self._split:
            return np.zeros_like(tokens), tokens
        parts, (number, _) = self.selection.parts(index), self._divide(documents)
        return parts * tokens // number, (parts + 1) * tokens // number

    def _segments(
        self, document: int, start: int, stop: int, key: int
    ) -> tuple[list[IntArray], bool]:
        """One segment, or two in the order in which they are shown, cut to the limit."""
        total = stop - start
        room = min(total, int(self._limit) - self._specials)
        draws = np.arange(2)
        if not self._binary_head:
            return [self._read_cut(document, start, total, room, derive(key, 10))], False
        ends = np.cumsum(self._documents.sentences(document)) - start
        ends = ends[(ends > 0) & (ends < total)]
        if not len(ends):
            ends = np.arange(1, total)
        pivot = int(ends[below(derive(key, 11), draws[:1], len(ends))[0]])
        first, second = pivot, total - pivot
        swapped = bool(bits(derive(key, 12), draws[:1])[0] & np.uint64(1))
        # The longer one is cut until both fit; when they are equal it is the second's turn.
        a, b = (second, first) if swapped else (first, second)
        if min(a, b) * 2 <= room:
            a, b = min(a, room - min(a, b)), min(b, room - min(a, b))
        else:
            a, b = room - room // 2, room // 2
        cut_first, cut_second = (b, a) if swapped else (a, b)
        segments = [
            self._read_cut(document, start, first, cut_first, derive(key, 13)),
            self._read_cut(document, start + first, second, cut_second, derive(key, 14)),
        ]
        return segments[::-1] if swapped else segments, swapped

    def _read_cut(self, document: int, start: int, length: int, keep: int, key: int) -> IntArray:
        """``keep`` of ``length`` tokens; each one that goes is the first or the last by a coin."""
        coins = bits(key, np.arange(length - keep)) & np.uint64(1)
        start += int(coins.sum())
        return self._documents.read(document, start, start + keep)

    def _assemble(self, segments: list[IntArray]) -> tuple[IntArray, IntArray, IntArray]:
        """Tokens, segment numbers, and the positions that are not special; int64 each."""
        cls, sep = (np.array([i]) for i in (self._vocabulary.cls, self._vocabulary.sep))
        parts, types, candidates = [cls], [np.zeros(1, dtype=np.int64)], []
        position = 1
        for number, segment in enumerate(segments):
            parts += [segment, sep]
            types.append(np.full(len(segment) + 1, number, dtype=np.int64))
            candidates.append(np.arange(position, position + len(segment), dtype=np.int64))
            position += len(segment) + 1
        return np.concatenate(parts), np.concatenate(types), np.concatenate(candidates)
