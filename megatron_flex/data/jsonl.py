"""Reading JSONL, Parquet or text as it comes: what is wrong is counted, or fatal if asked."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_flex.data.errors import DataError

BOM = b"\xef\xbb\xbf"
_ROWS = 1024  # of a Parquet file, read at once

# Repaired: the line is used all the same.
BYTE_ORDER_MARK = "byte-order mark removed"
CRLF = "CRLF line ending"
# Skipped.
BLANK = "blank line"
NOT_UTF8 = "invalid UTF-8"
BROKEN = "broken JSON"
NOT_OBJECT = "not a JSON object"
EMPTY = "empty text"


@dataclass(frozen=True)
class RawLine:
    """One line of a file as it stands, and how far the file has been read (bytes on disk)."""

    path: str
    number: int
    content: bytes
    position: int


@dataclass(frozen=True)
class ParsedLine:
    """The texts of a line, each a list of one text or of sentences; ``None`` if it is skipped.

    ``notes`` says what was repaired, or, last, why the line is skipped.
    """

    texts: dict[str, list[str]] | None
    notes: tuple[str, ...]


def files_of(pattern: str) -> list[str]:
    """The files of ``--input``, which is a pattern, or the path of a file.

    Raises:
        DataError: there is none.
    """
    found = sorted(glob.glob(pattern)) or [pattern]
    if not Path(found[0]).exists():
        raise DataError(f"--input {pattern}: no such file")
    return found


def read_lines(
    path: str, flag: str = "--input", *, line_by_line: bool = False
) -> Iterator[RawLine]:
    """The lines of a file; ``.gz`` is unpacked on the way.

    Rows of ``.parquet`` become lines, and so do the items of a ``.json`` file that is one array. A
    ``.txt`` file is one document as a whole, unless it has JSON objects, or is to be read
    ``line_by_line``. ``flag`` names the file in messages.

    Raises:
        DataError: the file cannot be read, or is a damaged archive.
    """
    if path.endswith(".parquet"):
        yield from _read_rows(path, flag)
        return
    try:
        if path.endswith(".json") and _is_array(path):
            yield from _read_items(path)
            return
        whole = path.endswith((".txt", ".txt.gz")) and not line_by_line
        if whole and (content := _whole(path)) is not None:
            yield RawLine(path, 1, content, Path(path).stat().st_size)
            return
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise DataError(f"{flag} {path}: cannot read it: {error}") from error
    try:
        with (
            Path(path).open("rb") as disk,
            gzip.GzipFile(fileobj=disk) if path.endswith(".gz") else nullcontext(disk) as stream,
        ):
            for number, content in enumerate(stream, start=1):
                yield RawLine(path, number, content, disk.tell())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{flag} {path}: cannot read it: {error}") from error


def _whole(path: str) -> bytes | None:
    """A text file as a line of JSONL; ``None`` if it is JSONL itself."""
    content = Path(path).read_bytes()
    if path.endswith(".gz"):
        content = gzip.decompress(content)
    if content.removeprefix(BOM).lstrip().startswith(b"{"):
        return None
    # What is no UTF-8 becomes halves of surrogate pairs, which are noticed where it is parsed.
    text = content.removeprefix(BOM).decode("utf-8", "surrogateescape")
    return json.dumps({"text": text.replace("\r\n", "\n")}).encode()


def _is_array(path: str) -> bool:
    with Path(path).open("rb") as stream:
        return stream.read(64).removeprefix(BOM).lstrip().startswith(b"[")


def _read_items(path: str) -> Iterator[RawLine]:
    content = Path(path).read_bytes()
    items = json.loads(content.decode("utf-8-sig"))
    for number, item in enumerate(items, start=1):
        line = json.dumps(item, ensure_ascii=False).encode("utf-8", "surrogatepass")
        yield RawLine(path, number, line, len(content) * number // len(items))


def _read_rows(path: str, flag: str) -> Iterator[RawLine]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(
            f"{flag} {path}: Parquet is read with pyarrow, which is not here ({error}): install it"
            " (pip install pyarrow), or write the rows as JSONL"
        ) from error
    size, number = Path(path).stat().st_size, 0
    try:
        with parquet.ParquetFile(path) as file:
            rows = file.metadata.num_rows
            for batch in file.iter_batches(_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    content = json.dumps(row, ensure_ascii=False, default=str).encode()
                    yield RawLine(path, number, content, size * number // rows)
    except (OSError, ArrowException) as error:
        raise DataError(f"{flag} {path}: cannot read it: {error}") from error


def read_record(
    content: bytes, *, first: bool = False
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """The JSON object of one line, ``None`` if there is none, and notes as of :class:`ParsedLine`.

    ``first`` is true for a file's first line.
    """
    notes: list[str] = []
    if first and content.startswith(BOM):
        content = content[len(BOM) :]
        notes.append(BYTE_ORDER_MARK)
    if content.endswith(b"\r\n"):
        notes.append(CRLF)
    if not content.strip():
        return None, (*notes, BLANK)
    try:
        record = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        return None, (*notes, NOT_UTF8)
    except (ValueError, RecursionError):
        return None, (*notes, BROKEN)
    if not isinstance(record, dict):
        return None, (*notes, NOT_OBJECT)
    return record, tuple(notes)


def parse(content: bytes, keys: Sequence[str], *, first: bool = False) -> ParsedLine:
    """Take the values of ``keys`` out of one line; ``first`` is true for a file's first line.

    A value is a string, or a list of strings (sentences, as Megatron's tool accepts them). A line
    is skipped as a whole if one of its values cannot be used, so that data sets of several keys
    stay aligned.
    """
    record, notes = read_record(content, first=first)
    if record is None:
        return ParsedLine(None, notes)
    texts: dict[str, list[str]] = {}
    for key in keys:
        if key not in record:
            return ParsedLine(None, (*notes, f"no key '{key}'"))
        value = record[key]
        sentences = [value] if isinstance(value, str) else value
        if not isinstance(sentences, list) or not all(isinstance(s, str) for s in sentences):
            return ParsedLine(None, (*notes, f"key '{key}' is not a string"))
        try:
            "".join(sentences).encode("utf-8")
        except UnicodeEncodeError:  # half of a surrogate pair, written as \udXXX
            return ParsedLine(None, (*notes, NOT_UTF8))
        if not any(s.strip() for s in sentences):
            return ParsedLine(None, (*notes, EMPTY))
        texts[key] = sentences
    return ParsedLine(texts, notes)
