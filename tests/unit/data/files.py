"""Real ``.bin``/``.idx`` files for tests, written with megatron-core's own builder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

Sentences = Sequence[Sequence[int]]


def write(prefix: Path, documents: Sequence[Sentences], dtype: Any = np.uint16) -> str:
    """Write documents, each a list of sequences; returns the prefix, as for ``--data-path``."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sentences in documents:
        tokens = np.array([t for s in sentences for t in s], dtype=np.int64)
        builder.add_document(tokens, [len(s) for s in sentences])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def write_flat(prefix: Path, documents: Sequence[Sequence[int]], dtype: Any = np.uint16) -> str:
    """Write documents of one sequence each; empty ones have none, as Megatron writes them."""
    return write(prefix, [[d] if len(d) else [] for d in documents], dtype)


def counting(lengths: Sequence[int], first: int = 10) -> list[list[int]]:
    """Documents of given lengths in which every token differs from every other."""
    starts = np.cumsum([first, *lengths])
    return [list(range(int(s), int(s) + n)) for s, n in zip(starts, lengths, strict=False)]
