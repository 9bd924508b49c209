"""Flags of the tokenizer and the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.config.option import option

TokenizerType = Literal[
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "NullTokenizer",
]

NEEDS: dict[str, tuple[str, ...]] = {
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "NullTokenizer": ("vocab_size",),
}
"""The fields that each type of tokenizer is made from."""


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """Which tokenizer the documents were made with. Only local files are read."""

    tokenizer_type: TokenizerType = option(derived="NullTokenizer with --mock-data, else required")
    """Kind of tokenizer."""

    tokenizer_model: str | None = None
    """SentencePiece model, or tokenizer.json of the Hugging Face tokenizers library."""

    vocab_file: str | None = None
    """Vocabulary of GPT2BPETokenizer (JSON) or BertWordPiece (one word a line)."""

    merge_file: str | None = None
    """Merges of GPT2BPETokenizer."""

    vocab_size: int | None = option(None, at_least=1)
    """NullTokenizer: number of token ids, before the end-of-document token is added."""

    padded_vocab_size: int | None = option(None, at_least=1)
    """Rows of the word embedding, instead of the vocabulary padded to a multiple of
    --make-vocab-size-divisible-by."""

    vocab_extra_ids: int = option(0, at_least=0)
    """Further token ids behind the tokenizer's own."""
