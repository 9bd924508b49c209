"""Real data for benchmarks: Python's standard library, as the demo prepares it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from benchmarks.products import make

ENOUGH = 2000
"""Documents whose tokens make the samples of equal lengths."""


@dataclass(frozen=True)
class StdlibData:
    """The data set in ``directory``, as in the demo's ``runs/demo/data``."""

    directory: Path

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's model."""
        return self.directory / "tokenizer.model"

    @property
    def prefix(self) -> Path:
        """Of .bin and .idx: a document for each function or class."""
        return self.directory / "stdlib_text_document"

    def write(self) -> None:
        """Make what is missing: corpus, tokenizer, tokens."""
        self.directory.mkdir(parents=True, exist_ok=True)
        corpus = self.directory / "corpus.jsonl"
        make(corpus, "tools/stdlib_corpus.py", "--output", corpus)
        make(self.tokenizer, "tools/train_tokenizer.py", "--input", corpus,
             "--vocab-size", 4096, "--output", self.tokenizer)  # fmt: skip
        make(
            self.prefix.with_suffix(".idx"), "tools/preprocess_data.py", "--input", corpus,
            "--output-prefix", self.directory / "stdlib", "--append-eod", "--workers", 1,
            "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", self.tokenizer,
        )  # fmt: skip

    def write_equal(self, prefix: Path, length: int) -> None:
        """Documents of ``length`` inputs each, from the same tokens one after the other."""
        real = IndexedDataset(str(self.prefix))
        tokens = np.concatenate([real[i] for i in range(min(ENOUGH, len(real)))]).astype(np.int64)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
        size = length + 1
        for start in range(0, len(tokens) - length, size):
            builder.add_document(torch.from_numpy(tokens[start : start + size]), [size])
        builder.finalize(f"{prefix}.idx")
