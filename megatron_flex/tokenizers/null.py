"""``NullTokenizer``: texts that are token ids already."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from megatron_flex.tokenizers.base import Offsets, TokenizerError


class NullTokenizer:
    """Ids separated by blanks; the id ``vocab_size`` of the flag ends a document.

    As megatron-core's ``NullTokenizer``: there is one id more than ``--vocab-size`` says.
    """

    pad = cls = sep = mask = continuation = None

    def __init__(self, vocab_size: int | None) -> None:
        if vocab_size is None or vocab_size < 1:
            raise TokenizerError("--tokenizer-type NullTokenizer needs --vocab-size of at least 1")
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of a text.

        Raises:
            TokenizerError: something is not an integer below ``vocab_size``.
        """
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise TokenizerError(f"NullTokenizer takes texts of token ids: {error}") from error
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise TokenizerError(
                f"token ids from {min(ids)} to {max(ids)}, but --vocab-size allows 0 to {self.eod}"
            )
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Token ids of a text and where in it each comes from."""
        places = [match.span() for match in re.finditer(r"\S+", text)]
        return self.encode(text), np.array(places, dtype=np.int64).reshape(-1, 2)

    def decode(self, ids: Sequence[int]) -> str:
        """The ids, separated by blanks."""
        return " ".join(map(str, ids))
