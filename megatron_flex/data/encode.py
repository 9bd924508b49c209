"""One JSONL line to token ids: what the workers of ``tools/preprocess_data.py`` run. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_flex.data.errors import DataError
from megatron_flex.data.jsonl import EMPTY, RawLine, parse
from megatron_flex.data.sentences import split_sentences

ENDED = "ends in the end token, which then stands between prompt and completion"


class TextTokenizer(Protocol):
    """What encoding needs of a tokenizer."""

    @property
    def eod(self) -> int | None:
        """Id that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""


@dataclass(frozen=True)
class EncodeOptions:
    """How documents are made of lines; fields are named as the flags.

    Attributes:
        keys: values that are taken from each line.
        split_sentences: split texts into sentences, each a sequence of its own.
        keep_newlines: leave white space between sentences in place.
        eod_keys: keys whose documents end with the end-of-document token.
        prompt_keys: keys whose documents should not end with that token.
        strict: raise on the first line that is not perfect.
    """

    keys: tuple[str, ...]
    split_sentences: bool = False
    keep_newlines: bool = False
    eod_keys: tuple[str, ...] = ()
    prompt_keys: tuple[str, ...] = ()
    strict: bool = False


@dataclass(frozen=True)
class Document:
    """Token ids of one key of one line, and the tokens of each sequence."""

    ids: list[int]
    lengths: list[int]


@dataclass
class Encoded:
    """The documents of some lines, with counts of notes, and the first line of each note."""

    documents: list[dict[str, Document]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    first: dict[str, tuple[str, int]] = field(default_factory=dict)
    skipped: int = 0
    position: int = 0


class Encoder:
    """Turns raw lines into documents.

    Raises:
        DataError: an end-of-document token is wanted and the tokenizer has none.
    """

    def __init__(self, tokenizer: TextTokenizer, options: EncodeOptions) -> None:
        if options.eod_keys and tokenizer.eod is None:
            raise DataError(
                "--append-eod: this tokenizer has no end-of-document token, or several that might"
                " be it; with HuggingFaceTokenizer, name eos_token in tokenizer_config.json"
            )
        self._tokenizer, self._options = tokenizer, options

    def lines(self, lines: Sequence[RawLine]) -> Encoded:
        """Encode some lines.

        Raises:
            DataError: a line is not perfect and ``strict`` is set; names file and line.
        """
        result = Encoded()
        for line in lines:
            documents, notes = self.several(line)
            if notes and self._options.strict:
                raise DataError(f"--strict: {line.path}, line {line.number}: {notes[-1]}")
            for note in notes:
                result.notes[note] = result.notes.get(note, 0) + 1
                result.first.setdefault(note, (line.path, line.number))
            if documents is None:
                result.skipped += 1
            else:
                result.documents += documents
            result.position = line.position
        return result

    def several(self, line: RawLine) -> tuple[list[dict[str, Document]] | None, tuple[str, ...]]:
        """What one line gives: see :meth:`line`."""
        documents, notes = self.line(line)
        return None if documents is None else [documents], notes

    def line(self, line: RawLine) -> tuple[dict[str, Document] | None, tuple[str, ...]]:
        """The documents of one line, or ``None``, and notes (the last says why it is skipped)."""
        parsed = parse(line.content, self._options.keys, first=line.number == 1)
        if parsed.texts is None:
            return None, parsed.notes
        documents = {key: self._document(key, texts) for key, texts in parsed.texts.items()}
        if not all(document.lengths for document in documents.values()):
            return None, (*parsed.notes, EMPTY)
        return documents, (*parsed.notes, *self._ended(documents))

    def _ended(self, documents: dict[str, Document]) -> list[str]:
        """Notes on prompts: what follows an end token is another document to the model."""
        prompts = documents.keys() & self._options.prompt_keys
        ends = (key for key in sorted(prompts) if documents[key].ids[-1] == self._tokenizer.eod)
        return [f"'{key}' {ENDED}" for key in ends]

    def _document(self, key: str, texts: list[str]) -> Document:
        options = self._options
        if options.split_sentences:
            texts = [
                sentence
                for text in texts
                for sentence in split_sentences(text, keep_newlines=options.keep_newlines)
            ]
        ids: list[int] = []
        lengths: list[int] = []
        for text in texts:
            sequence = self._tokenizer.encode(text)
            if sequence:
                ids += sequence
                lengths.append(len(sequence))
        if lengths and key in options.eod_keys:
            assert self._tokenizer.eod is not None
            ids.append(self._tokenizer.eod)
            lengths[-1] += 1
        return Document(ids, lengths)


def make_lines(
    make_encoder: Callable[[], Encoder], step: Callable[[], object]
) -> Callable[[Sequence[RawLine]], Encoded]:
    """What a process of :class:`megatron_flex.processes.Processes` does: encode lines."""
    del step  # lines are few
    return make_encoder().lines
