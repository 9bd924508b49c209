"""Prompts to complete: texts, or conversations whose next answer is the assistant's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_flex.data.conversation import Unusable, read_question
from megatron_flex.data.errors import DataError
from megatron_flex.data.jsonl import BOM, NOT_UTF8, read_lines, read_record
from megatron_flex.data.turns import Turns
from megatron_flex.tokenizers.base import Tokenizer, TokenizerError
from megatron_flex.tokenizers.chat_template import ChatTemplate, TemplateError, TemplateSource

Asked = str | Mapping[str, Any]
"""A text, or a record with ``messages``."""


@dataclass(frozen=True)
class Prompt:
    """What a completion is added to.

    Attributes:
        text: as the model reads it.
        ids: of that text.
    """

    text: str
    ids: tuple[int, ...]


class Prompts:
    """Makes prompts of what people ask, with one tokenizer and one chat template."""

    def __init__(self, tokenizer: Tokenizer, template: TemplateSource | None) -> None:
        """``template`` is for conversations; ``None``: there are none."""
        self._tokenizer = tokenizer
        self._template = None if template is None else ChatTemplate(template)

    def make(self, asked: Asked) -> Prompt:
        """A prompt.

        Raises:
            DataError: it is no question, or the template refuses it.
        """
        text = asked if isinstance(asked, str) else self._rendered(asked)
        try:
            ids = tuple(self._tokenizer.encode(text))
        except TokenizerError as error:
            raise DataError(f"the prompt {text[:60]!r}: {error}") from error
        except UnicodeEncodeError:  # half of a surrogate pair, written as \udXXX
            raise DataError(f"the prompt {text[:60]!r}: {NOT_UTF8}") from None
        if not ids:
            raise DataError(f"the prompt {text[:60]!r} has no tokens")
        return Prompt(text, ids)

    def _rendered(self, record: Mapping[str, Any]) -> str:
        assert self._template is not None
        try:
            found = read_question(record)
            return self._template.render(
                found.messages, tools=found.tools, add_generation_prompt=True, more=found.more
            ).text
        except (Unusable, TemplateError) as error:
            raise DataError(f"a conversation among the prompts: {error}") from error

    def stops(self) -> list[tuple[int, ...]]:
        """Rows of tokens after which a completion is over: what ends documents and answers."""
        found: list[tuple[int, ...]] = []
        if self._tokenizer.eod is not None:
            found.append((self._tokenizer.eod,))
        if self._template is not None and (end := Turns(self._template).end):
            found.append(tuple(self._tokenizer.encode(end)))
        return list(dict.fromkeys(found))

    def said(self, ids: tuple[int, ...]) -> str:
        """The text of a completion; rows of the vocabulary that are no tokens have none."""
        return self._tokenizer.decode([i for i in ids if i < self._tokenizer.vocab_size])


def read_asked(path: str, flag: str) -> list[Asked]:
    """The prompts of a file, one a line: JSON with ``text`` or ``messages``, or a text as it is.

    Raises:
        DataError: the file cannot be read, or a line is none of these.
    """
    found = list(_asked(path, flag))
    if not found:
        raise DataError(f"{flag} {path}: there is no prompt in it")
    return found


def _asked(path: str, flag: str) -> Iterator[Asked]:
    for line in read_lines(path, flag, line_by_line=True):
        content = line.content.removeprefix(BOM).strip()
        if not content:
            continue
        if not content.startswith(b"{"):
            try:
                yield content.decode()
            except UnicodeDecodeError:
                raise DataError(f"{flag} {path}, line {line.number}: {NOT_UTF8}") from None
            continue
        record, notes = read_record(content)
        if record is None:
            raise DataError(f"{flag} {path}, line {line.number}: {notes[-1]}")
        text = record.get("text", record.get("prompt"))
        if isinstance(text, str):
            yield text
        elif "messages" in record or "conversations" in record:
            yield record
        else:
            raise DataError(
                f"{flag} {path}, line {line.number}: there is no 'text' and there are no 'messages'"
            )
