"""Writing Megatron ``.bin``/``.idx`` files, whole or not at all."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from megatron_flex.imports import quick_import

with quick_import():
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


class IndexedWriter:
    """Writes ``prefix.bin`` and ``prefix.idx`` through megatron-core's builder.

    Both are written under temporary names, are whole after :meth:`finish`, and take their own in
    :meth:`commit`; leaving the ``with`` block without it removes them. The old index goes first, so
    that at no time an index stands beside the ``.bin`` of another run.

    Args:
        prefix: path without ending.
        vocab_size: decides the type of a token, as in Megatron: uint16 below 65,500, else int32.
    """

    def __init__(self, prefix: str, vocab_size: int) -> None:
        self.prefix = prefix
        self.lengths = array("q")  # tokens of each document, for statistics
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._temporary = f"{prefix}.part{os.getpid()}"
        self._builder = IndexedDatasetBuilder(
            self._temporary + ".bin", dtype=DType.optimal_dtype(vocab_size)
        )

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = self._temporary + ".bin"  # where a disk is full
        with suppress(OSError):  # what could not be written is not wanted
            self._builder.data_file.close()
        for ending in (".bin", ".idx"):
            Path(self._temporary + ending).unlink(missing_ok=True)

    def add(self, ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Append a document; ``lengths`` are the tokens of its sequences."""
        self._builder.add_document(np.asarray(ids, dtype=np.int64), list(lengths))
        self.lengths.append(len(ids))

    def add_files(self, prefix: str) -> None:
        """Append all documents of another pair of files of the same type."""
        self._builder.add_index(prefix)

    def finish(self) -> None:
        """Write what is missing: the disk has all of both files then.

        Raises:
            OSError: such as a full disk.
        """
        self._builder.finalize(self._temporary + ".idx")
        for ending in (".bin", ".idx"):
            with open(self._temporary + ending, "rb") as stream:
                os.fsync(stream.fileno())

    def commit(self) -> None:
        """Give the finished files their names."""
        Path(self.prefix + ".idx").unlink(missing_ok=True)
        os.replace(self._temporary + ".bin", self.prefix + ".bin")
        os.replace(self._temporary + ".idx", self.prefix + ".idx")
