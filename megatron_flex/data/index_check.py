"""Checks of a Megatron ``.bin``/``.idx`` pair, before megatron-core maps it into memory.

Layout of the ``.idx`` (megatron-core 0.16, ``megatron/core/datasets/indexed_dataset.py``): 9 bytes
magic, uint64 version, uint8 type code, uint64 number of sequences, uint64 number of document
borders, then int32 length of each sequence, int64 byte offset of each, int64 document borders
(sequence numbers, the first is 0), and for multimodal data one int8 mode a sequence.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from megatron_flex.data.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip
_PIECE = 1 << 22  # sequences checked at a time: bounds scratch memory to about 100 MB


@dataclass(frozen=True)
class IndexInfo:
    """What the header says. ``size`` is in bytes, of the ``.bin``."""

    dtype: type[np.integer[Any]]
    num_sequences: int
    num_documents: int
    size: int


def check_index(prefix: str) -> IndexInfo:
    """Check that ``prefix.idx`` and ``prefix.bin`` are whole and belong together.

    Reads the index once (0.4 s for 30 million documents), the ``.bin`` not at all.

    Raises:
        DataError: missing, unreadable, truncated, corrupt or empty; the message names the file.
    """
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    for path in (index, data):
        if not path.is_file():
            hint = ""
            if prefix.endswith((".bin", ".idx")):
                hint = f"; give the prefix without the ending: {prefix[:-4]}"
            raise DataError(
                f"data set '{prefix}': {path} does not exist. --data-path takes the common prefix"
                f" of a .bin and a .idx file, as tools/preprocess_data.py writes them{hint}"
            )
        if not os.access(path, os.R_OK):
            raise DataError(f"data set '{prefix}': no permission to read {path}")
    try:
        return _check(index, data)
    except OSError as error:
        raise DataError(f"data set '{prefix}': cannot read {index}: {error}") from error


def _corrupt(path: Path, what: str) -> NoReturn:
    raise DataError(f"{path} {what}; write it again with tools/preprocess_data.py")


def _check(index: Path, data: Path) -> IndexInfo:
    size = index.stat().st_size
    with index.open("rb") as stream:
        head = stream.read(_HEADER.size)
    if head[:9] != _MAGIC[: len(head)]:
        _corrupt(index, "is not the index of a Megatron data set (bad magic number)")
    if len(head) < _HEADER.size:
        _corrupt(index, f"is truncated: {size} bytes, the header alone has {_HEADER.size}")
    _, version, code, sequences, borders = _HEADER.unpack(head)
    if version != 1:
        _corrupt(index, f"has format version {version}, only version 1 is known")
    if code not in _TYPES:
        _corrupt(index, f"has type code {code}, which is no integer type of tokens")
    expected = _HEADER.size + 12 * sequences + 8 * borders
    if size not in (expected, expected + sequences):
        state = "truncated" if size < expected else "corrupt"
        _corrupt(
            index,
            f"is {state}: {size} bytes, but {sequences} sequences and {borders - 1} documents"
            f" need {expected}",
        )
    if borders < 1:
        _corrupt(index, "is corrupt: it has no document borders")
    info = IndexInfo(_TYPES[code], sequences, borders - 1, data.stat().st_size)
    if sequences == 0 or info.num_documents == 0 or info.size == 0:
        raise DataError(
            f"data set '{str(index)[:-4]}' is empty ({info.num_documents} documents, {sequences}"
            f" sequences, {info.size} bytes of tokens): look at the counts that"
            " tools/preprocess_data.py printed, and choose another --data-path"
        )
    _check_arrays(index, data, info)
    return info


def _check_arrays(index: Path, data: Path, info: IndexInfo) -> None:
    n, itemsize = info.num_sequences, np.dtype(info.dtype).itemsize
    whole = np.memmap(index, dtype=np.uint8, mode="r")
    body = whole.data[_HEADER.size :]
    lengths = np.frombuffer(body, np.int32, n, 0)
    pointers = np.frombuffer(body, np.int64, n, 4 * n)
    borders = np.frombuffer(body, np.int64, info.num_documents + 1, 12 * n)
    end = 0
    for i in range(0, n, _PIECE):
        piece = lengths[i : i + _PIECE].astype(np.int64)
        if piece.min() < 0:
            _corrupt(index, f"is corrupt: sequence {i + int(piece.argmin())} has negative length")
        stops = np.cumsum(piece * itemsize) + end
        wrong = np.flatnonzero(pointers[i : i + _PIECE] != stops - piece * itemsize)
        if wrong.size:
            _corrupt(
                index,
                f"is corrupt: the offset of sequence {i + int(wrong[0])} is not where the one"
                " before it ends",
            )
        end = int(stops[-1])
    if borders[0] != 0 or borders[-1] != n:
        _corrupt(index, f"is corrupt: documents cover {borders[0]} to {borders[-1]}, not 0 to {n}")
    for i in range(0, info.num_documents, _PIECE):
        if np.any(np.diff(borders[i : i + _PIECE + 1]) < 0):
            _corrupt(index, "is corrupt: document borders are not ascending")
    if info.size != end:
        state = "is truncated" if info.size < end else "does not belong to its index"
        _corrupt(data, f"{state}: {info.size} bytes, but {index.name} describes {end}")
