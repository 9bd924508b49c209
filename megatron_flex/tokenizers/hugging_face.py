"""Tokenizers that run in the Hugging Face ``tokenizers`` library, from local files only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron_flex.tokenizers import special_tokens
from megatron_flex.tokenizers.base import Offsets, TokenizerError, existing

# Names under which published tokenizers have their special tokens; they count only where the files
# beside ``tokenizer.json`` name none.
_USUAL = {
    "eos_token": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"),
    "pad_token": ("<pad>", "[PAD]"),
    "cls_token": ("[CLS]", "<cls>", "<CLS>"),
    "sep_token": ("[SEP]", "<sep>", "<SEP>"),
    "mask_token": ("[MASK]", "<mask>", "<MASK>"),
}


class _LibraryTokenizer:
    """What all tokenizers of the library share; subclasses set the special tokens."""

    pad: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    eod: int | None = None
    continuation: npt.NDArray[np.bool_] | None = None

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise TokenizerError("the tokenizer's vocabulary is empty")
        self.vocab_size = max(vocabulary.values()) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is added at its ends."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Token ids of a text and where in it each comes from."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return found.ids, np.array(found.offsets, dtype=np.int64).reshape(-1, 2)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


class HuggingFaceTokenizer(_LibraryTokenizer):
    """``HuggingFaceTokenizer``: a ``tokenizer.json``, or a directory that holds one.

    The vocabulary is that of ``tokenizer.json`` and of ``added_tokens_decoder`` in
    ``tokenizer_config.json``. Special tokens are those that ``tokenizer_config.json`` or
    ``special_tokens_map.json`` beside it name; where they say nothing, the one of the usual names
    that ``tokenizer.json`` marks as special (none, if it marks several). Truncation, padding,
    dropout and templates that ``tokenizer.json`` stores are switched off: a text is encoded whole,
    always alike, and nothing is put around it.
    """

    def __init__(self, path: str | None) -> None:
        given = existing(path, "--tokenizer-model", "HuggingFaceTokenizer")
        file = Path(given)
        if file.is_dir():
            file = Path(existing(str(file / "tokenizer.json"), "--tokenizer-model", ""))
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(
                f"--tokenizer-model {file} is not a tokenizer.json of the tokenizers library:"
                f" {error}"
            ) from error
        _switch_off_state(tokenizer)
        special = special_tokens.read(file.parent)
        special.add_to(tokenizer)
        tokenizer.encode_special_tokens = special.split
        super().__init__(tokenizer)
        self.eod, self.pad, self.cls, self.sep, self.mask = (
            special.id_of(tokenizer, key, usual) for key, usual in _USUAL.items()
        )
        self.continuation = _continuation(tokenizer, self.vocab_size)


def _switch_off_state(tokenizer: tokenizers.Tokenizer) -> None:
    """Leave vocabulary and rules; what else a file stores belongs to one use of it."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None  # puts tokens around a text, or the text twice
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None  # merges left out at random


class GPT2BPETokenizer(_LibraryTokenizer):
    """``GPT2BPETokenizer``: byte-level BPE from ``vocab.json`` and ``merges.txt``.

    As Megatron-LM's: no prefix blank, and ``<|endoftext|>`` ends a document but is not looked for
    in texts.
    """

    def __init__(self, vocab_file: str | None, merge_file: str | None) -> None:
        vocabulary = existing(vocab_file, "--vocab-file", "GPT2BPETokenizer")
        merges = existing(merge_file, "--merge-file", "GPT2BPETokenizer")
        try:
            model = models.BPE.from_file(vocabulary, merges)
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(
                f"--vocab-file {vocabulary} and --merge-file {merges} are not a GPT-2 vocabulary:"
                f" {error}"
            ) from error
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        super().__init__(tokenizer)
        self.eod = tokenizer.token_to_id("<|endoftext|>")
        if self.eod is None:
            raise TokenizerError(f"--vocab-file {vocabulary} has no token <|endoftext|>")


class BertWordPieceTokenizer(_LibraryTokenizer):
    """``BertWordPieceLowerCase`` and ``BertWordPieceCase``: ``vocab.txt``, one token a line.

    As Megatron-LM's: ``[BOS]`` and ``[EOS]`` get ids behind the vocabulary if it lacks them, and
    names of special tokens are not looked for in texts.
    """

    def __init__(self, vocab_file: str | None, *, lower_case: bool) -> None:
        kind = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
        path = existing(vocab_file, "--vocab-file", kind)
        try:
            vocabulary = models.WordPiece.read_file(path)
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"--vocab-file {path} cannot be read: {error}") from error
        missing = [t for t in ("[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]") if t not in vocabulary]
        if missing:
            raise TokenizerError(f"--vocab-file {path} lacks {', '.join(missing)}")
        tokenizer = tokenizers.Tokenizer(
            models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=200)
        )
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
        super().__init__(tokenizer)
        for name in ("[BOS]", "[EOS]"):
            if name not in vocabulary:
                vocabulary[name] = self.vocab_size
                self.vocab_size += 1
        self.cls, self.sep = vocabulary["[CLS]"], vocabulary["[SEP]"]
        self.pad, self.mask = vocabulary["[PAD]"], vocabulary["[MASK]"]
        self.eod = vocabulary["[EOS]"]
        self.continuation = _continuation(tokenizer, self.vocab_size)


def _continuation(tokenizer: tokenizers.Tokenizer, size: int) -> npt.NDArray[np.bool_] | None:
    """Which tokens are ``##…``; ``None`` when the model is no WordPiece."""
    if not isinstance(tokenizer.model, models.WordPiece):
        return None
    result = np.zeros(size, dtype=bool)
    ids = [i for token, i in tokenizer.get_vocab().items() if token.startswith("##")]
    result[ids] = True
    return result
