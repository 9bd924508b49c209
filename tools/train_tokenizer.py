#!/usr/bin/env python3
"""Train a tokenizer on JSONL, in seconds: a SentencePiece model, or a WordPiece vocabulary.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output tokenizer.model
    python tools/train_tokenizer.py --input corpus.jsonl --model-type wordpiece --output vocab.txt

The second is for BERT, with --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt, or with
--cased for BertWordPieceCase. The same input gives the same file: evenly spaced documents, and one
thread for SentencePiece.

A SentencePiece model loses nothing: text is not normalised, runs of blanks and newlines are kept,
and characters that it does not know become bytes. It has <CLS> <SEP> <EOD> <MASK> <pad> pieces, so
it serves GPT and BERT, and what --special-tokens adds.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

if __name__ == "__main__":  # from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_flex.data.bar import SHORT, progress_bar, shown
from megatron_flex.data.errors import DataError
from megatron_flex.data.jsonl import files_of, parse, read_lines
from megatron_flex.signals import end_quietly, run_tool
from megatron_flex.telemetry.files import replace

RESERVED = ("<unk>", "<s>", "</s>", "<pad>", "<CLS>", "<SEP>", "<EOD>", "<MASK>")
"""Pieces that every model has."""


def sample(paths: Sequence[str], keys: list[str], max_characters: int) -> list[str]:
    """Texts of evenly spaced documents, about ``max_characters`` characters in all.

    Raises:
        DataError: a file cannot be read, or none has text.
    """
    total = sum(sum(map(len, texts)) for texts in _texts(paths, keys))
    if total == 0:
        raise DataError(
            f"--input {paths[0]}: no line has text in {', '.join(keys)}; {_what_it_has(paths[0])}"
        )
    every = -(-total // max_characters)
    return [t for i, texts in enumerate(_texts(paths, keys)) if i % every == 0 for t in texts]


def _what_it_has(path: str) -> str:
    """The keys with texts in a file's first lines, for a message."""
    found: dict[str, None] = {}
    for line, _ in zip(read_lines(path), range(100), strict=False):
        try:
            record = json.loads(line.content)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            found |= dict.fromkeys(k for k, v in record.items() if isinstance(v, (str, list)))
    if not found:
        return "its first lines are no JSON objects with texts, one a line"
    return f"its lines have texts in {', '.join(found)}: give one of them to --json-keys"


def _texts(paths: Sequence[str], keys: list[str]) -> Iterator[list[str]]:
    sizes = [os.path.getsize(path) if os.path.isfile(path) else 0 for path in paths]
    with progress_bar(sum(sizes), "read", unit="B", delay=SHORT) as bar:
        for number, path in enumerate(paths):
            before = sum(sizes[:number])
            for line in read_lines(path):
                bar.update(before + line.position - bar.n)
                parsed = parse(line.content, keys, first=line.number == 1)
                if parsed.texts is not None:
                    yield ["".join(sentences) for sentences in parsed.texts.values()]


def train(
    texts: list[str],
    vocab_size: int,
    model_type: str,
    special: Sequence[str] = (),
    *,
    speak: bool = False,
) -> bytes:
    """The model file; ``special``: texts that are one piece each, wherever they stand.

    ``speak``: SentencePiece writes what it does to the standard error stream.

    Raises:
        DataError: the texts are too few for so large a vocabulary.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            num_threads=1,
            shuffle_input_sentence=False,
            max_sentence_length=1 << 30,
            character_coverage=0.9999,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n", *special],
            control_symbols=["<CLS>", "<SEP>", "<EOD>", "<MASK>"],
            pad_id=3,
            minloglevel=0 if speak else 2,
        )
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).rpartition("] ")[2]  # without SentencePiece's line of source
        raise DataError(f"--vocab-size {vocab_size}: {reason}") from error
    return model.getvalue()


def train_shown(
    texts: list[str], vocab_size: int, model_type: str, special: Sequence[str] = ()
) -> bytes:
    """:func:`train` in a process of its own, whose log tells how far it has come."""
    context = multiprocessing.get_context("fork")  # the texts are there already
    ours, theirs = context.Pipe(duplex=False)
    with (
        tempfile.NamedTemporaryFile() as log,
        progress_bar(vocab_size, "train", unit=" pieces", delay=SHORT) as bar,
    ):
        words = (texts, vocab_size, model_type, special)
        process = context.Process(target=_train_apart, args=(log.name, theirs, words), daemon=True)
        process.start()
        theirs.close()
        while not ours.poll(0.2):
            bar.update(max(0, min(vocab_size, _pieces(log.name, vocab_size)) - bar.n))
        try:
            result = ours.recv()
        except EOFError:
            process.join()
            raise DataError(
                f"training ended with status {process.exitcode}; is there too little memory for"
                f" --max-characters {sum(map(len, texts))}?"
            ) from None
        process.join()
        if isinstance(result, DataError):
            raise result
        bar.update(vocab_size - bar.n)
    content: bytes = result
    return content


def _train_apart(log: str, answer: Connection, words: tuple[Any, ...]) -> None:
    end_quietly()
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    try:
        answer.send(train(*words, speak=True))
    except DataError as error:
        answer.send(error)


def _pieces(log: str, vocab_size: int) -> int:
    """How many pieces there are by SentencePiece's log: BPE adds them, unigram leaves some."""
    with open(log, "rb") as stream:
        stream.seek(-min(4096, os.path.getsize(log)), os.SEEK_END)
        tail = stream.read()
    found = re.findall(rb"\b(merges|size)=(\d+)", tail)
    if not found:
        return 0
    what, number = found[-1][0], int(found[-1][1])
    return number if what == b"merges" or number <= vocab_size else vocab_size**2 // number


def train_wordpiece(texts: list[str], vocab_size: int, *, cased: bool = False) -> bytes:
    """A ``vocab.txt`` of BERT's form, one token a line in the order of ids.

    Texts are cut as ``BertWordPieceLowerCase`` does, with ``cased`` as ``BertWordPieceCase``.

    Raises:
        DataError: the texts are too few for so large a vocabulary, or it is too small for them.
    """
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # The trainer numbers these as it meets them, in an order of hashes, and numbers break the ties
    # of pairs: so they are numbered here.
    inner: set[str] = set()
    for text in shown(texts, "read", unit=" documents"):
        normal = tokenizer.normalizer.normalize_str(text)
        words = tokenizer.pre_tokenizer.pre_tokenize_str(normal)
        inner.update(*(word[1:] for word, _ in words))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[
            *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
            *(f"##{character}" for character in sorted(inner)),
        ],
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(shown(texts, "train", unit=" documents"), trainer)
    found = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if len(found) > vocab_size:
        raise DataError(
            f"--vocab-size {vocab_size}: characters alone make {len(found)} pieces: raise it"
        )
    if len(found) < vocab_size:
        raise DataError(
            f"--vocab-size {vocab_size}: the texts give {len(found)} pieces: lower it, or raise"
            " --max-characters"
        )
    return "".join(f"{token}\n" for token, _ in found).encode()


def main(words: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Train a SentencePiece model or a WordPiece vocabulary on JSONL.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input", required=True, help="JSONL, Parquet or .txt file, or pattern in quotes"
    )
    parser.add_argument("--output", type=Path, required=True, help="model file to write")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="values to train on")
    parser.add_argument("--vocab-size", type=int, default=8192, help="number of pieces")
    parser.add_argument(
        "--special-tokens",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="texts that are one piece each wherever they stand, such as '<|user|>'",
    )
    parser.add_argument(
        "--model-type",
        choices=("bpe", "unigram", "wordpiece"),
        default="bpe",
        help="bpe and unigram are SentencePiece's, wordpiece is BERT's; default bpe",
    )
    parser.add_argument("--cased", action="store_true", help="wordpiece: keep capital letters")
    parser.add_argument(
        "--max-characters", type=int, default=4_000_000, help="characters to train on"
    )
    flags = parser.parse_args(words)
    try:
        if flags.max_characters < 1:
            raise DataError("--max-characters must be at least 1")
        wordpiece = flags.model_type == "wordpiece"
        if flags.cased and not wordpiece:
            raise DataError("--cased is for --model-type wordpiece: others keep capitals anyway")
        if flags.special_tokens and wordpiece:
            raise DataError(
                "--special-tokens is for SentencePiece: BertWordPiece looks for no tokens in texts"
            )
        clash = {"\n", "", *RESERVED} & set(flags.special_tokens)
        if clash or len(set(flags.special_tokens)) < len(flags.special_tokens):
            raise DataError(
                "--special-tokens must differ from each other, and from those that every model has:"
                f" {', '.join(RESERVED)}"
            )
        texts = sample(files_of(flags.input), flags.json_keys, flags.max_characters)
        if wordpiece:
            content = train_wordpiece(texts, flags.vocab_size, cased=flags.cased)
        else:
            content = train_shown(texts, flags.vocab_size, flags.model_type, flags.special_tokens)
        flags.output.parent.mkdir(parents=True, exist_ok=True)
        replace(flags.output, [content])
    except (DataError, OSError) as error:
        print(f"train_tokenizer: {error}", file=sys.stderr)
        return 1
    print(f"{flags.vocab_size} pieces from {sum(map(len, texts))} characters: {flags.output}")
    return 0


if __name__ == "__main__":
    run_tool(main)
