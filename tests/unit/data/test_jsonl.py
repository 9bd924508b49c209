from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.errors import DataError
from megatron_flex.data.jsonl import parse, read_lines

values = st.text(min_size=1).filter(lambda s: s.strip())


@given(values, st.booleans())
def test_text_comes_out_as_it_went_in(text: str, ascii_only: bool) -> None:
    line = json.dumps({"text": text, "other": 1}, ensure_ascii=ascii_only).encode() + b"\n"
    parsed = parse(line, ("text",))
    assert parsed.texts == {"text": [text]}
    assert parsed.notes == ()


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"\n", "blank line"),
        (b"  \r\n", "blank line"),
        (b"\xff\xfe{\n", "invalid UTF-8"),
        (b'{"text": "caf\xe9"}\n', "invalid UTF-8"),
        (b'{"text": "half \\ud83d pair"}\n', "invalid UTF-8"),
        (b'{"text": "cut off\n', "broken JSON"),
        (b'{"text": "a"} {"text": "b"}\n', "broken JSON"),
        (b'\xef\xbb\xbf{"text": "a mark on a later line"}\n', "broken JSON"),
        (b"[" * 100_000 + b"\n", "broken JSON"),
        (b'["text"]\n', "not a JSON object"),
        (b"null\n", "not a JSON object"),
        (b'{"txt": "a"}\n', "no key 'text'"),
        (b'{"text": null}\n', "key 'text' is not a string"),
        (b'{"text": 7}\n', "key 'text' is not a string"),
        (b'{"text": ["a", 7]}\n', "key 'text' is not a string"),
        (b'{"text": ""}\n', "empty text"),
        (b'{"text": " \\n "}\n', "empty text"),
        (b'{"text": []}\n', "empty text"),
    ],
)
def test_a_line_that_cannot_be_used_says_why(content: bytes, note: str) -> None:
    parsed = parse(content, ("text",))
    assert parsed.texts is None
    assert parsed.notes[-1] == note


def test_marks_and_line_endings_are_repaired_and_noted() -> None:
    parsed = parse(b'\xef\xbb\xbf{"text": "a"}\r\n', ("text",), first=True)
    assert parsed.texts == {"text": ["a"]}
    assert parsed.notes == ("byte-order mark removed", "CRLF line ending")


def test_one_bad_key_drops_the_whole_line_so_that_keys_stay_aligned() -> None:
    assert parse(b'{"p": "a", "c": ""}\n', ("p", "c")).texts is None
    assert parse(b'{"p": "a", "c": "b"}\n', ("p", "c")).texts == {"p": ["a"], "c": ["b"]}


def test_lists_of_sentences_are_taken_as_they_are() -> None:
    assert parse(b'{"text": ["One.", "Two."]}\n', ("text",)).texts == {"text": ["One.", "Two."]}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_have_numbers_and_positions(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = b'{"text": "a"}\n\n{"text": "no newline at the end"}'
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    lines = list(read_lines(str(path)))
    assert [line.number for line in lines] == [1, 2, 3]
    assert b"".join(line.content for line in lines) == content
    assert lines[-1].position == path.stat().st_size


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_file_is_one_document_unless_it_is_jsonl(tmp_path: Path, name: str) -> None:
    def lines(content: bytes) -> list[bytes]:
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return [line.content for line in read_lines(str(path))]

    (line,) = lines('\ufeffTo be,\r\nor not "to be"\n'.encode())
    assert parse(line, ("text",)).texts == {"text": ['To be,\nor not "to be"\n']}
    (line,) = lines(b"\xff\xfe")
    assert parse(line, ("text",)).notes == ("invalid UTF-8",)
    assert lines(b'{"text": "a"}\n{"text": "b"}\n') == [b'{"text": "a"}\n', b'{"text": "b"}\n']


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--input .*none\.jsonl: cannot read it"):
        list(read_lines(str(tmp_path / "none.jsonl")))
    whole = gzip.compress(b"some text\n" * 1000)
    for name in ("cut.gz", "cut.txt.gz"):
        for content in (whole[:-20], whole[:10] + b"\xff" * 20 + whole[30:]):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(DataError, match=rf"{name}: cannot read it"):
                list(read_lines(str(tmp_path / name)))
