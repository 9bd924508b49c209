"""Rows that only pad the vocabulary: no part of the checksum, and free to differ between runs.

``--make-vocab-size-divisible-by`` adds rows to the word embedding and to the output layer that no
token uses. How many depends on the run, so the state of two runs is compared without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_BY_TOKEN = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")

PADDED = "padded_vocab_size"


def token_rows(name: str, shape: Sequence[int], model: Mapping[str, Any]) -> int | None:
    """How many first rows of tensor ``name`` belong to tokens; ``None`` when all matter.

    ``name`` may be of a parameter or of its optimizer state. ``model`` has ``vocab_size`` and
    ``padded_vocab_size``, or the tensor counts as a whole.
    """
    size, padded = model.get("vocab_size"), model.get(PADDED)
    if size is None or padded is None or not name.endswith(_BY_TOKEN):
        return None
    return int(size) if shape and shape[0] == padded else None
