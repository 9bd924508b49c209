"""SentencePiece models, with the two ways in which Megatron-LM uses them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_pb2

from megatron_flex.tokenizers.base import Offsets, TokenizerError, existing


def _load(model_file: str | None, kind: str) -> sentencepiece.SentencePieceProcessor:
    path = existing(model_file, "--tokenizer-model", kind)
    try:
        return sentencepiece.SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError) as error:
        raise TokenizerError(
            f"--tokenizer-model {path} is not a SentencePiece model: {error}"
        ) from error


class GPTSentencePieceTokenizer:
    """``GPTSentencePieceTokenizer``: the model as it is; its ``</s>`` ends a document."""

    cls = sep = mask = continuation = None

    def __init__(self, model_file: str | None) -> None:
        self._model = _load(model_file, "GPTSentencePieceTokenizer")
        self.vocab_size: int = self._model.get_piece_size()
        self.eod = _present(self._model.eos_id())
        self.pad = _present(self._model.pad_id())

    @property
    def serialized(self) -> bytes:
        """The model file."""
        content: bytes = self._model.serialized_model_proto()
        return content

    @property
    def named(self) -> dict[str, str]:
        """Special tokens, by the names that Hugging Face gives them."""
        found = {
            "bos_token": self._model.bos_id(),
            "eos_token": self._model.eos_id(),
            "pad_token": self._model.pad_id(),
        }
        return {key: self._model.id_to_piece(i) for key, i in found.items() if i >= 0}

    @property
    def special(self) -> tuple[str, ...]:
        """Names of special tokens, in the order of ids that the model lacks."""
        return tuple(self.named.values())

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self._model.encode_as_ids(text)
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Token ids of a text and where in it each comes from."""
        return _with_offsets(self._model, text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        text: str = self._model.decode_ids(list(ids))
        return text


class SentencePieceTokenizer:
    """``SentencePieceTokenizer``: with ``<CLS> <SEP> <EOD> <MASK>``, padding, begin and end.

    As Megatron-LM's legacy class of that name (its successor has no end-of-document token):
    pieces that the model lacks get ids behind its own, and where a text contains one of these
    names literally, its id is put there.
    """

    continuation = None

    def __init__(self, model_file: str | None) -> None:
        self._model = _load(model_file, "SentencePieceTokenizer")
        pieces: int = self._model.get_piece_size()
        known = {self._model.id_to_piece(i): i for i in range(pieces)}
        self._special: dict[str, int] = {}
        self.vocab_size = pieces
        for name in (
            "<CLS>",
            "<SEP>",
            "<EOD>",
            "<MASK>",
            self._name(self._model.pad_id(), "<PAD>"),
            self._name(self._model.bos_id(), "<BOS>"),
            self._name(self._model.eos_id(), "<EOS>"),
        ):
            if name not in known:
                known[name] = self.vocab_size
                self.vocab_size += 1
            self._special[name] = known[name]
        self._names = {i: name for name, i in self._special.items()}
        self._pattern = re.compile("|".join(map(re.escape, self._special)))
        self.cls, self.sep, self.eod, self.mask, self.pad = list(self._special.values())[:5]

    def _name(self, piece: int, default: str) -> str:
        name: str = self._model.id_to_piece(piece) if piece >= 0 else default
        return name

    @property
    def serialized(self) -> bytes:
        """The model file."""
        content: bytes = self._model.serialized_model_proto()
        return content

    @property
    def named(self) -> dict[str, str]:
        """Special tokens, by the names that Hugging Face gives them: the end is ``<EOD>``."""
        keys = ("cls_token", "sep_token", "eos_token", "mask_token", "pad_token", "bos_token")
        return dict(zip(keys, self._special, strict=False))

    @property
    def special(self) -> tuple[str, ...]:
        """Names of special tokens, in the order of ids that the model lacks."""
        return tuple(self._special)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text):
            ids += self._model.encode_as_ids(text[start : match.start()])
            ids.append(self._special[match[0]])
            start = match.end()
        ids += self._model.encode_as_ids(text[start:])
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Token ids of a text and where in it each comes from."""
        ids: list[int] = []
        places: list[Offsets] = []
        start = 0
        for match in [*self._pattern.finditer(text), None]:
            end = len(text) if match is None else match.start()
            found, offsets = _with_offsets(self._model, text[start:end])
            ids += found
            places.append(offsets + start)
            if match is not None:
                ids.append(self._special[match[0]])
                places.append(np.array([match.span()], dtype=np.int64))
                start = match.end()
        return ids, np.concatenate(places)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens by name, with a blank on either side."""
        text = ""
        run: list[int] = []
        for token in ids:
            if token in self._names:
                text += f"{self._model.decode_ids(run)} {self._names[token]} "
                run = []
            else:
                run.append(token)
        text += self._model.decode_ids(run)
        return text


def _with_offsets(
    model: sentencepiece.SentencePieceProcessor, text: str
) -> tuple[list[int], Offsets]:
    content = text.encode()
    found = sentencepiece_pb2.SentencePieceText.FromString(
        model.encode(text, out_type="serialized_proto")
    ).pieces
    places: Offsets = np.array([(p.begin, p.end) for p in found], dtype=np.int64).reshape(-1, 2)
    if len(content) > len(text):  # SentencePiece counts bytes
        begins = (np.frombuffer(content, dtype=np.uint8) & 0xC0) != 0x80
        places = np.concatenate([[0], np.cumsum(begins)])[places]
    return [p.id for p in found], places


def _present(token: int) -> int | None:
    return token if token >= 0 else None
