"""What the data room needs of a collection of documents, wherever it comes from."""

from __future__ import annotations

from typing import Protocol

from megatron_flex.data.keyed import IntArray


class Documents(Protocol):
    """Tokenized documents, addressed by number. Lengths are known without reading tokens."""

    @property
    def name(self) -> str:
        """For messages: the path prefix."""

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""

    def lengths(self, documents: IntArray) -> IntArray:
        """Tokens of each document, ``[n]`` int64."""

    def num_sentences(self, documents: IntArray) -> IntArray:
        """Sequences (sentences) of each document, ``[n]`` int64."""

    def sequence_lengths(self, documents: IntArray) -> IntArray:
        """Tokens of each sequence of all these documents, one after the other, int64."""

    def sentences(self, document: int) -> IntArray:
        """Tokens of each sequence (sentence) of one document, int64."""

    def read(self, document: int, start: int, stop: int) -> IntArray:
        """Tokens ``[start, stop)`` of a document, int64; a copy."""
