from __future__ import annotations

import pytest

from megatron_flex.data.encode import Document, EncodeOptions, Encoder
from megatron_flex.data.errors import DataError
from megatron_flex.data.jsonl import RawLine
from megatron_flex.tokenizers.null import NullTokenizer


def line(content: str, number: int = 2) -> RawLine:
    return RawLine("in.jsonl", number, content.encode(), 100 * number)


def encoder(*keys: str, **options: object) -> Encoder:
    return Encoder(
        NullTokenizer(100),
        EncodeOptions(keys=keys or ("text",), **options),  # type: ignore[arg-type]
    )


def test_a_document_is_its_tokens_and_the_end() -> None:
    documents, notes = encoder(eod_keys=("text",)).line(line('{"text": "5 6 7"}'))
    assert documents == {"text": Document([5, 6, 7, 100], [4])}
    assert notes == ()


def test_the_end_is_put_only_where_it_is_wanted() -> None:
    documents, _ = encoder("p", "c", eod_keys=("c",)).line(line('{"p": "1 2", "c": "3"}'))
    assert documents == {"p": Document([1, 2], [2]), "c": Document([3, 100], [2])}


def test_sentences_are_sequences_and_the_end_belongs_to_the_last() -> None:
    documents, _ = encoder(eod_keys=("text",)).line(line('{"text": ["1 2", " ", "3"]}'))
    assert documents == {"text": Document([1, 2, 3, 100], [2, 2])}
    split = encoder(split_sentences=True).line(line('{"text": "1 2\\n\\n3"}'))[0]
    assert split == {"text": Document([1, 2, 3], [2, 1])}


def test_flaws_are_counted_and_the_others_go_on() -> None:
    result = encoder().lines(
        [line('{"text": "1"}\r\n'), line("{"), line('{"text": ""}'), line('{"text": "2"}', 9)]
    )
    assert [d["text"].ids for d in result.documents] == [[1], [2]]
    assert result.notes == {"CRLF line ending": 1, "broken JSON": 1, "empty text": 1}
    assert result.skipped == 2
    assert result.position == 900


def test_strict_stops_at_the_first_flaw_and_names_it() -> None:
    with pytest.raises(DataError, match=r"--strict: in\.jsonl, line 7: broken JSON"):
        encoder(strict=True).lines([line('{"text": "1"}'), line("{", 7)])
    with pytest.raises(DataError, match="line 2: CRLF line ending"):
        encoder(strict=True).lines([line('{"text": "1"}\r\n')])


def test_a_tokenizer_without_an_end_is_refused() -> None:
    tokenizer = NullTokenizer(5)
    tokenizer.eod = None  # type: ignore[assignment]
    with pytest.raises(DataError, match="--append-eod"):
        Encoder(tokenizer, EncodeOptions(("text",), eod_keys=("text",)))
