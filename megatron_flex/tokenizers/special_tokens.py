"""Which tokens of a Hugging Face tokenizer are special: what the files beside it say, no guess.

``tokenizer_config.json`` (and the older ``special_tokens_map.json``) name them under keys such as
``eos_token``; ``added_tokens_decoder`` in the former gives ids to tokens, also to some that
``tokenizer.json`` lacks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from megatron_flex.tokenizers.base import TokenizerError

_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # the latter counts
_RULES = ("special", "single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True)
class SpecialTokens:
    """What the files beside ``tokenizer.json`` say of tokens.

    Attributes:
        directory: where they lie, for messages.
        named: token by key such as ``eos_token``; ``None`` where a file says that there is none.
        added: ``added_tokens_decoder``: id and token, in the order of ids.
        split: names of special tokens are not looked for in texts (``split_special_tokens``).
    """

    directory: Path
    named: Mapping[str, str | None]
    added: Sequence[tuple[int, tokenizers.AddedToken]]
    split: bool = False

    def add_to(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Give ``tokenizer`` the tokens of ``added_tokens_decoder`` that it lacks.

        Raises:
            TokenizerError: the token or its id is another one in ``tokenizer.json``, or ids are
                left out between (the library numbers tokens in a row).
        """
        where = f"added_tokens_decoder in {self.directory / _FILES[1]}"
        for number, token in self.added:
            known = tokenizer.token_to_id(token.content)
            other = tokenizer.id_to_token(number)
            if known is None and other is None:
                tokenizer.add_tokens([token])
                known = tokenizer.token_to_id(token.content)
                if known != number:
                    raise TokenizerError(
                        f"{where} gives '{token.content}' the id {number}, but the next free id"
                        f" after tokenizer.json is {known}: list the tokens between, or correct it"
                    )
            elif known != number:
                has = f"'{other}' has it" if known is None else f"its id is {known}"
                raise TokenizerError(
                    f"{where} gives '{token.content}' the id {number}, but in tokenizer.json {has}:"
                    " take both files from one tokenizer"
                )

    def id_of(self, tokenizer: tokenizers.Tokenizer, key: str, usual: Sequence[str]) -> int | None:
        """The id of the special token ``key``; ``None`` if there is none.

        Args:
            tokenizer: after :meth:`add_to`.
            key: such as ``eos_token``.
            usual: names that count if no file mentions ``key`` and one of them, alone, is marked as
                special.

        Raises:
            TokenizerError: a file names a token that has no id.
        """
        if key not in self.named:
            # A text of that name in the vocabulary is not special by itself.
            added = tokenizer.get_added_tokens_decoder().items()
            found = [i for i, token in added if token.special and token.content in usual]
            return found[0] if len(found) == 1 else None
        name = self.named[key]
        if name is None:
            return None
        number: int | None = tokenizer.token_to_id(name)
        if number is None:
            raise TokenizerError(
                f"{key} in {self.directory} is '{name}', which neither tokenizer.json nor"
                f" added_tokens_decoder in {_FILES[1]} has: add it there, or name another token"
            )
        return number


def read(directory: Path) -> SpecialTokens:
    """Read the files in ``directory``; those that are not there say nothing.

    Raises:
        TokenizerError: a file cannot be read or holds something else.
    """
    named: dict[str, str | None] = {}
    added: list[tuple[int, tokenizers.AddedToken]] = []
    split = False
    for path in (directory / name for name in _FILES):
        if not path.is_file():
            continue
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            for key, value in content.items():
                if key.endswith("_token") and (value is None or isinstance(value, str | dict)):
                    named[key] = value["content"] if isinstance(value, dict) else value
            if path.name == _FILES[1]:
                split = content.get("split_special_tokens") is True
                added = [
                    _added(*item) for item in (content.get("added_tokens_decoder") or {}).items()
                ]
        except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
            raise TokenizerError(f"{path} cannot be read: {error!r}") from error
    return SpecialTokens(directory, named, sorted(added, key=lambda item: item[0]), split)


def _added(number: str, fields: dict[str, Any]) -> tuple[int, tokenizers.AddedToken]:
    if not number.isdecimal():
        raise ValueError(f"added_tokens_decoder: '{number}' is no token id")
    rules = {name: bool(fields[name]) for name in _RULES if name in fields}
    return int(number), tokenizers.AddedToken(fields["content"], **rules)
