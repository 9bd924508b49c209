"""From ``--tokenizer-type`` to a tokenizer."""

from __future__ import annotations

from megatron_flex.tokenizers.base import Tokenizer, TokenizerError

TYPES = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "NullTokenizer",
)


def build_tokenizer(
    tokenizer_type: str,
    *,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    """Make a tokenizer from local files; arguments are Megatron's flags.

    Raises:
        TokenizerError: an unknown type, a flag it needs is missing, or a file is bad.
    """
    # Imported here: each library takes a moment to load, and one is needed.
    if tokenizer_type == "NullTokenizer":
        from megatron_flex.tokenizers.null import NullTokenizer

        return NullTokenizer(vocab_size)
    if tokenizer_type in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
        from megatron_flex.tokenizers import sentence_piece

        if tokenizer_type == "SentencePieceTokenizer":
            return sentence_piece.SentencePieceTokenizer(tokenizer_model)
        return sentence_piece.GPTSentencePieceTokenizer(tokenizer_model)
    if tokenizer_type in TYPES:
        from megatron_flex.tokenizers import hugging_face

        if tokenizer_type == "HuggingFaceTokenizer":
            return hugging_face.HuggingFaceTokenizer(tokenizer_model)
        if tokenizer_type == "GPT2BPETokenizer":
            return hugging_face.GPT2BPETokenizer(vocab_file, merge_file)
        return hugging_face.BertWordPieceTokenizer(
            vocab_file, lower_case=tokenizer_type == "BertWordPieceLowerCase"
        )
    raise TokenizerError(
        f"--tokenizer-type {tokenizer_type} is not known; choose one of {', '.join(TYPES)}"
    )
