"""A SentencePiece model as files from which transformers makes the same ids.

``AutoTokenizer`` guesses how a lone ``tokenizer.model`` is to be read, and guesses wrong for most.
A ``tokenizer.json`` of the tokenizers library leaves nothing to guess. Where that library cannot do
what SentencePiece does, nothing is written: ids are compared on texts of the model's own pieces.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers

from megatron_flex.tokenizers.sentence_piece import (
    GPTSentencePieceTokenizer,
    SentencePieceTokenizer,
)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
_UNIGRAM, _BPE = 1, 2  # types of models
_BLANK = "▁"
_NEVER = -1e6  # score of unigram pieces that no text has
_PROBES = 200
_PROBED = (
    *("", " ", "  a", "a  b ", "\n\n x\n", "\t1234 -5.67e8", "<0x41> <unk> <s> </s>"),
    *("naïve café ﬁ ①", "数据\u3000和 — “x”", "\U0001f642\u200d e\u0301"),
    "== != <= __init__(self):\n    pass\n",
)


class NotConvertible(ValueError):
    """Why the tokenizers library cannot do what a SentencePiece model does."""


def hugging_face_files(
    tokenizer: SentencePieceTokenizer | GPTSentencePieceTokenizer,
) -> dict[str, bytes]:
    """``tokenizer.json`` and ``tokenizer_config.json`` that give the ids of ``tokenizer``.

    Raises:
        NotConvertible: there are none.
    """
    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.serialized)
    special = tokenizer.special
    converted = _convert(model, special)
    # A model that is used as it is does not look for names of special tokens in texts.
    converted.encode_special_tokens = isinstance(tokenizer, GPTSentencePieceTokenizer)
    for text in (*_PROBED, *_probes(model)):
        if tokenizer.encode(text) != converted.encode(text, add_special_tokens=False).ids:
            raise NotConvertible(f"it has other ids for {text[:60]!r}")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        **tokenizer.named,
    }
    if converted.encode_special_tokens:
        config["split_special_tokens"] = True
    return {
        "tokenizer.json": converted.to_str(pretty=True).encode() + b"\n",
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n",
    }


def _convert(model: Any, special: tuple[str, ...]) -> tokenizers.Tokenizer:
    trainer, rules = model.trainer_spec, model.normalizer_spec
    symbols = [p.piece for p in model.pieces if p.type == _USER_DEFINED and len(p.piece) > 1]
    for reason in (
        trainer.model_type not in (_UNIGRAM, _BPE) and "its pieces are whole words or characters",
        trainer.treat_whitespace_as_suffix and "blanks end its pieces",
        not rules.escape_whitespaces and "it does not mark blanks",
        any(p.type == _UNUSED for p in model.pieces) and "it has unused pieces",
        symbols and rules.add_dummy_prefix
        and "it puts a blank before texts, but not after symbols of its own",
        any(_BLANK in symbol for symbol in symbols) and "a symbol of its own has a blank",
    ):  # fmt: skip
        if reason:
            raise NotConvertible(str(reason))
    build = _bpe if trainer.model_type == _BPE else _unigram
    result = tokenizers.Tokenizer(build(model))
    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(_BLANK))
    steps.append(normalizers.Replace(" ", _BLANK))
    result.normalizer = normalizers.Sequence(steps)
    undo = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.add_dummy_prefix:
        undo.append(decoders.Strip(" ", 1, 0))
    result.decoder = decoders.Sequence(undo)
    result.add_special_tokens(
        [tokenizers.AddedToken(name, normalized=False, special=True) for name in special]
    )
    result.add_tokens([tokenizers.AddedToken(s, normalized=False) for s in symbols])
    return result


def _bpe(model: Any) -> models.BPE:
    """Merges in the order of their results' scores, which is how SentencePiece chooses them."""
    ids = {p.piece: i for i, p in enumerate(model.pieces)}
    normal = {p.piece: p.score for p in model.pieces if p.type == _NORMAL}
    found = [
        (-score, ids[piece[:i]], ids[piece[i:]], (piece[:i], piece[i:]))
        for piece, score in normal.items()
        for i in range(1, len(piece))
        if piece[:i] in normal and piece[i:] in normal
    ]
    return models.BPE(
        vocab=ids,
        merges=[merge for *_, merge in sorted(found)],
        unk_token=model.pieces[model.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _unigram(model: Any) -> models.Unigram:
    textual = (_NORMAL, _USER_DEFINED)
    vocabulary = [(p.piece, p.score if p.type in textual else _NEVER) for p in model.pieces]
    spec = model.trainer_spec
    return models.Unigram(vocabulary, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback)


def _probes(model: Any) -> Iterator[str]:
    """Texts of pieces in any order, the same for the same model."""
    draw = random.Random(len(model.pieces))
    pieces = [p.piece.replace(_BLANK, " ") for p in model.pieces if p.type != _BYTE]
    for _ in range(_PROBES):
        yield "".join(draw.choices(pieces, k=draw.randint(1, 30)))
