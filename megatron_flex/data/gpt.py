"""GPT samples: one document each, the next token is the target."""

from __future__ import annotations

import numpy as np

from megatron_flex.data.documents import Documents
from megatron_flex.data.keyed import IntArray
from megatron_flex.data.samples import Overlong, Row, select


class GptSamples:
    """Documents ``[start, stop)`` as samples: inputs are ``t[:-1]``, labels ``t[1:]``.

    With ``Overlong.SPLIT`` a document is as many samples as it needs, each with the next
    ``max_length`` inputs: every token is an input once and, but for the first, a label once.

    Args:
        documents: where tokens and lengths come from.
        start: first document of the split.
        stop: one after the last; ``None`` for all.
        max_length: most input tokens of a sample (``--max-sample-length``).
        overlong: what to do with longer ones (``--overlong``).

    Raises:
        DataError: see :func:`megatron_flex.data.samples.select`.
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
        self._documents = documents
        self._limit = int(np.iinfo(np.int64).max) if max_length is None else max_length
        stop = documents.num_documents if stop is None else stop
        self.selection = select(
            documents.name, start, stop, self._measure, max_length, overlong, divide=self._divide
        )

    def lengths(self, index: IntArray) -> IntArray:
        """Input tokens of each sample, ``[n]`` int64."""
        lengths, _ = self._measure(self.selection.documents(index))
        return np.minimum(lengths - self.selection.parts(index) * self._limit, self._limit)

    def loss_tokens(self, index: IntArray) -> IntArray:
        """Targets of each sample, ``[n, 1]`` int64: every input token has one."""
        return self.lengths(index)[:, None]

    def read(
        self, index: int, number: int, start: int, stop: int, *, inputs: bool, targets: bool
    ) -> Row:
        """Tokens ``[start, stop)`` of a sample and their targets (``number`` plays no part)."""
        where = np.array([index])
        document = int(self.selection.documents(where)[0])
        begin = int(self.selection.parts(where)[0]) * self._limit
        start, stop = start + begin, stop + begin
        if not targets:
            return Row(tokens=self._documents.read(document, start, stop) if inputs else None)
        tokens = self._documents.read(document, start, stop + 1)
        return Row(
            tokens=tokens[:-1] if inputs else None,
            labels=tokens[1:],
            loss_mask=np.ones(stop - start, dtype=np.float32),
        )

    def as_conversations(self) -> str | None:
        """A sentence if the documents are conversations, by their name."""
        if not self._documents.name.endswith("_chat_document"):
            return None
        return (
            f"{self._documents.name} has conversations, and the loss is on all of their tokens:"
            " give --sample-format chat for the answers alone"
        )

    def _divide(self, documents: IntArray) -> tuple[IntArray, IntArray]:
        lengths, _ = self._measure(documents)
        return -(-lengths // self._limit), np.zeros_like(lengths)

    def _measure(self, documents: IntArray) -> tuple[IntArray, IntArray]:
        lengths = self._documents.lengths(documents) - 1
        return lengths, np.minimum(lengths, self._limit)
