"""What the rest of the system needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]
"""``[n, 2]``: first character of each token, and one after its last."""


class TokenizerError(ValueError):
    """A tokenizer that cannot be made or used: the message names the file or flag."""


class Tokenizer(Protocol):
    """Text to token ids and back. Special tokens are ``None`` where the tokenizer has none."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: every id is below it. Without ``--vocab-extra-ids`` and padding."""

    @property
    def eod(self) -> int | None:
        """Id that ends a document (``--append-eod``)."""

    @property
    def pad(self) -> int | None:
        """Id of the padding token."""

    @property
    def cls(self) -> int | None:
        """Id that starts a BERT sample."""

    @property
    def sep(self) -> int | None:
        """Id that ends a segment of a BERT sample."""

    @property
    def mask(self) -> int | None:
        """Id that stands for a masked token."""

    @property
    def continuation(self) -> npt.NDArray[np.bool_] | None:
        """``[vocab_size]``: whether a token continues a word (``##…``); ``None`` if none does."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is added at its ends."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Token ids of a text and where in it each comes from.

        Tokens that share a character have it all; those that no character stands for are empty.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


def existing(path: str | None, flag: str, kind: str) -> str:
    """The path of a file that must be there.

    Raises:
        TokenizerError: no path was given, or there is no such file.
    """
    if path is None:
        raise TokenizerError(f"--tokenizer-type {kind} needs {flag}")
    if not Path(path).exists():
        where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        raise TokenizerError(
            f"{flag} {path}: no such file{where}: give the path of the tokenizer's file"
        )
    return path
