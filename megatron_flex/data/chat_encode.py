"""One conversation to token ids and what counts of them, as ``tools/preprocess_data.py`` does it.

A conversation is a document whose sequences count in turn: the first does not (it may be empty),
the second does, and so on. So the loss mask is in the index, beside the tokens, and takes no room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_flex.data.conversation import Unusable, form_of, read_conversation
from megatron_flex.data.encode import Document, EncodeOptions, Encoder
from megatron_flex.data.jsonl import EMPTY, NOT_UTF8, RawLine, read_record
from megatron_flex.data.turns import REWRITES, TOOLS_LEFT_OUT, Marked, Turns
from megatron_flex.tokenizers.base import Offsets, Tokenizer
from megatron_flex.tokenizers.chat_template import ChatTemplate, Span, TemplateError, TemplateSource

CHAT = "chat"
"""The key of conversations: their data set is ``{prefix}_chat_document``."""


@dataclass(frozen=True)
class ChatOptions:
    """How conversations are read.

    Attributes:
        form: one of :data:`megatron_flex.data.conversation.FORMATS`.
        named: all lines have that form; else lines of another form are read as what they are.
        template: writes them as text.
        everything: all tokens count, not the assistant's alone.
    """

    form: str
    template: TemplateSource
    everything: bool = False
    named: bool = False


class ChatEncoder(Encoder):
    """Turns raw lines with a conversation each into documents."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions, chat: ChatOptions) -> None:
        super().__init__(tokenizer, options)
        self._ids, self._chat = tokenizer, chat
        self._template = ChatTemplate(chat.template)
        self._turns = Turns(self._template)

    def several(self, line: RawLine) -> tuple[list[dict[str, Document]] | None, tuple[str, ...]]:
        """The documents of one line, usually one, and notes."""
        record, notes = read_record(line.content, first=line.number == 1)
        if record is None:
            return None, notes
        try:
            form = self._chat.form if self._chat.named else form_of(record, self._chat.form)
            conversation = read_conversation(record, form)
            turns = self._turns
            found = (turns.everything if self._chat.everything else turns.answers)(conversation)
            documents = [self._encoded(marked) for marked in found]
        except Unusable as reason:
            return None, (*notes, str(reason))
        except TemplateError as error:
            return None, (*notes, f"chat template: {error}")
        except UnicodeEncodeError:  # half of a surrogate pair, written as \udXXX
            return None, (*notes, NOT_UTF8)
        if not self._template.takes(conversation.tools):
            notes = (*notes, TOOLS_LEFT_OUT)
        if len(documents) > 1:
            notes = (*notes, REWRITES)
        return [{CHAT: document} for document in documents], notes

    def _encoded(self, marked: Marked) -> Document:
        marked.text.encode()
        ids, places = self._ids.encode_with_offsets(marked.text)
        lengths = sequences(owners(places, marked.spans))
        ids = ids[: sum(lengths)]
        if sum(lengths[1::2]) == 0 or len(ids) < 2:
            raise Unusable(EMPTY)
        if CHAT in self._options.eod_keys:
            assert self._tokenizer.eod is not None
            ids.append(self._tokenizer.eod)
            lengths[-1] += 1
        return Document(ids, lengths)


def make_encoder(
    make_tokenizer: Callable[[], Tokenizer], options: EncodeOptions, chat: ChatOptions | None
) -> Encoder:
    """What turns lines into documents: conversations with ``chat``, else texts."""
    if chat is None:
        return Encoder(make_tokenizer(), options)
    return ChatEncoder(make_tokenizer(), options, chat)


def owners(places: Offsets, spans: Sequence[Span]) -> np.ndarray:
    """For each token the span that has a character of it, counted from 1; 0 where none has.

    A token without characters belongs where it stands. Of two spans the later has it.
    """
    borders = np.array(spans, dtype=np.int64).reshape(-1, 2)
    last = np.maximum(places[:, 1] - 1, places[:, 0])
    number = np.searchsorted(borders[:, 0], last, side="right")
    ends = np.concatenate([[0], borders[:, 1]])[number]
    result: np.ndarray = np.where(ends > places[:, 0], number, 0)
    return result


def sequences(owner: np.ndarray) -> list[int]:
    """Lengths of runs up to the last that counts: those at odd places count, and each is of one
    owner; an empty run stands between two that follow each other."""
    changes = np.flatnonzero(np.diff(owner)) + 1
    starts = np.concatenate([[0], changes])[: len(owner)]
    lengths: list[int] = []
    runs = np.diff(np.concatenate([starts, [len(owner)]])).tolist()
    for counts, length in zip((owner[starts] > 0).tolist(), runs, strict=True):
        if counts and len(lengths) % 2 == 0:
            lengths.append(0)
        lengths.append(length)
    return lengths if len(lengths) % 2 == 0 else lengths[:-1]
