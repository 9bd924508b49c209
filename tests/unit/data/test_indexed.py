from __future__ import annotations

import errno
import gc
import os
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_flex.data.errors import DataError
from megatron_flex.data.index_check import check_index
from megatron_flex.data.indexed import IndexedDocuments
from megatron_flex.data.indexed_writer import IndexedWriter
from tests.unit.data.files import counting, write, write_flat

HEADER = 34
token_lists = st.lists(st.integers(0, 60000), max_size=6)
document_lists = st.lists(st.lists(token_lists, max_size=4), min_size=1, max_size=8).filter(
    lambda documents: any(s for d in documents for s in d)
)
dtypes = st.sampled_from([np.uint16, np.int32, np.int64])


def changed(prefix: str, ending: str, change: Callable[[bytearray], None]) -> None:
    path = Path(prefix + ending)
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


@given(document_lists, dtypes, st.booleans())
def test_files_of_megatron_are_read_token_by_token(
    documents: list[list[list[int]]], dtype: Any, mmap: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        prefix = write(Path(directory, "d"), documents, dtype)
        opened = IndexedDocuments(prefix, 60001, mmap=mmap)
        joined = [[t for s in d for t in s] for d in documents]
        numbers = np.arange(len(documents))
        assert opened.num_documents == len(documents)
        assert opened.lengths(numbers).tolist() == [len(d) for d in joined]
        assert opened.num_sentences(numbers).tolist() == [len(d) for d in documents]
        for number, tokens in enumerate(joined):
            assert opened.sentences(number).tolist() == [len(s) for s in documents[number]]
            assert opened.read(number, 0, len(tokens)).tolist() == tokens
            middle = len(tokens) // 2
            assert opened.read(number, middle, len(tokens)).tolist() == tokens[middle:]


def test_tokens_outlive_the_files_they_came_from(tmp_path: Path) -> None:
    opened = IndexedDocuments(write_flat(tmp_path / "d", counting([5, 7])))
    kept = [opened.read(1, 0, 7), opened.lengths(np.arange(2)), opened.sentences(0)]
    del opened
    gc.collect()
    assert [a.tolist() for a in kept] == [list(range(15, 22)), [5, 7], [5]]


def test_a_token_outside_the_vocabulary_is_named_when_the_file_is_opened(tmp_path: Path) -> None:
    prefix = write_flat(tmp_path / "d", [[1, 2], [3, 512, 4]])
    IndexedDocuments(prefix, 513)
    with pytest.raises(DataError, match=r"d\.bin: token id 512 .*document 1.* vocabulary of 512"):
        IndexedDocuments(prefix, 512)


def test_a_token_outside_the_vocabulary_is_found_in_the_middle_too(tmp_path: Path) -> None:
    documents = [[1] * 100_000, [], [7, 99, 1], [1] * 100_000]
    opened = IndexedDocuments(write_flat(tmp_path / "d", documents), 50)
    with pytest.raises(DataError, match=r"token id 99 \(token 100001 of the file, document 2\)"):
        opened.read(2, 0, 3)


def test_negative_tokens_are_refused_without_a_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token id -5"):
        IndexedDocuments(write_flat(tmp_path / "d", [[1, -5]], np.int32))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    prefix = write_flat(tmp_path / "d", [[1, 2]])
    with pytest.raises(DataError, match=r"nowhere\.idx does not exist"):
        IndexedDocuments(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=rf"without the ending: {prefix}$"):
        IndexedDocuments(prefix + ".idx")
    Path(prefix + ".idx").unlink()
    with pytest.raises(DataError, match=r"d\.idx does not exist"):
        IndexedDocuments(prefix)


@pytest.mark.parametrize("documents", [[], [[]], [[], [], []]])
def test_an_empty_data_set_says_so(tmp_path: Path, documents: list[list[int]]) -> None:
    prefix = write_flat(tmp_path / "d", documents)
    with pytest.raises(DataError, match="is empty"):
        IndexedDocuments(prefix)


@given(st.data())
def test_a_truncated_file_is_never_read(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        prefix = write_flat(Path(directory, "d"), counting([3, 0, 4, 1]))
        ending = data.draw(st.sampled_from([".bin", ".idx"]))
        size = Path(prefix + ending).stat().st_size
        keep = data.draw(st.integers(0, size - 1))
        changed(prefix, ending, lambda content: content.__delitem__(slice(keep, None)))
        with pytest.raises(DataError, match=r"truncated|is empty|bad magic"):
            IndexedDocuments(prefix)


@given(st.data())
def test_a_changed_byte_in_the_index_is_found_or_does_no_harm(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        prefix = write_flat(Path(directory, "d"), counting([3, 0, 4, 1]))
        size = Path(prefix + ".idx").stat().st_size
        place = data.draw(st.integers(0, size - 1))
        value = data.draw(st.integers(1, 255))

        def flip(content: bytearray) -> None:
            content[place] ^= value

        changed(prefix, ".idx", flip)
        sequences = 3
        if 18 <= place < HEADER + 12 * sequences or place < 17:
            with pytest.raises(DataError, match=r"d\.(idx|bin)|is empty"):
                IndexedDocuments(prefix)
        else:  # the type of tokens, or borders of documents that still ascend
            try:
                opened = IndexedDocuments(prefix)
            except DataError:
                return
            lengths = opened.lengths(np.arange(opened.num_documents))
            for number, length in enumerate(lengths.tolist()):
                assert len(opened.read(number, 0, length)) == length


def test_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    prefix = str(tmp_path / "d")
    for tokens in (100_000, 1):  # more than a buffer, and what the last flush would write
        with suppress(OSError), IndexedWriter(prefix, 100) as writer:
            writer._builder.data_file.close()
            writer._builder.data_file = open("/dev/full", "wb")  # noqa: SIM115
            writer.add([1] * tokens, [tokens])
        assert not list(tmp_path.iterdir())
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        pytest.raises(OSError, match=rf"No space left on device: '{prefix}\.part"),
        IndexedWriter(prefix, 100),
    ):
        raise full


def test_a_bin_of_another_run_does_not_fit(tmp_path: Path) -> None:
    prefix = write_flat(tmp_path / "d", [[1, 2, 3]])
    changed(prefix, ".bin", lambda content: content.extend(b"\0\0"))
    with pytest.raises(DataError, match=r"does not belong to its index: 8 bytes, .* describes 6"):
        IndexedDocuments(prefix)


def test_other_files_are_recognised(tmp_path: Path) -> None:
    prefix = write_flat(tmp_path / "d", [[1, 2, 3]])
    for content, message in (
        (b"TNTIDX\0\0" * 8, "not the index of a Megatron data set"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 2, 8, 1, 2), "format version 2"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 6, 1, 2), "type code 6"),
    ):
        Path(prefix + ".idx").write_bytes(content)
        with pytest.raises(DataError, match=message):
            check_index(prefix)


def test_an_index_of_multimodal_data_is_read_without_its_modes(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=np.int32, multimodal=True)
    builder.add_document(np.array([5, 6, 7]), [1, 2], [0, 1])
    builder.finalize(str(tmp_path / "d.idx"))
    opened = IndexedDocuments(str(tmp_path / "d"))
    assert opened.read(0, 0, 3).tolist() == [5, 6, 7]


def sparse(prefix: Path, documents: int) -> str:
    """A large data set: an index of one-sequence documents, and a ``.bin`` full of holes."""
    lengths = (np.arange(documents, dtype=np.int32) % 7) + 2
    pointers = np.cumsum(lengths, dtype=np.int64) * 2
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        lengths.tofile(stream)
        np.concatenate([[0], pointers[:-1]]).tofile(stream)
        np.arange(documents + 1, dtype=np.int64).tofile(stream)
    with open(f"{prefix}.bin", "wb") as stream:
        stream.truncate(int(pointers[-1]))
    return str(prefix)


def test_opening_makes_no_object_for_each_document(tmp_path: Path) -> None:
    prefix = sparse(tmp_path / "d", 500_000)
    tracemalloc.start()
    opened = IndexedDocuments(prefix, 10)
    blocks = sum(s.count for s in tracemalloc.take_snapshot().statistics("filename"))
    tracemalloc.stop()
    assert opened.num_documents == 500_000
    assert blocks < 20_000


@pytest.mark.soak
def test_thirty_million_documents_open_in_seconds(tmp_path: Path) -> None:
    import time

    prefix = sparse(tmp_path / "d", 30_000_000)
    start = time.perf_counter()
    IndexedDocuments(prefix, 10)
    assert time.perf_counter() - start < 5
