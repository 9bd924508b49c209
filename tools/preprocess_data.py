#!/usr/bin/env python3
"""Tokenize JSONL, Parquet or text files into Megatron's .bin/.idx files, one document a line.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model \
        --append-eod --workers 4

writes data/corpus_text_document.bin and .idx. Flags are Megatron-LM's, and --strict,
--append-eod-keys. Lines that cannot be used (broken JSON, invalid UTF-8, missing or non-string
keys, empty texts) are skipped and counted.

Conversations (--sample-format chat; found by itself where lines have no "text") are written by the
tokenizer's chat template, with which of their tokens the loss is on:

    python tools/preprocess_data.py --input chats.jsonl --output-prefix data/chats \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model Llama-3.2-1B-Instruct --workers 4

writes data/chats_chat_document.bin and .idx.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_flex.data.chat_encode import CHAT, ChatOptions
from megatron_flex.data.conversation import FORMATS, formats_of
from megatron_flex.data.encode import ENDED, EncodeOptions
from megatron_flex.data.errors import DataError
from megatron_flex.data.jsonl import files_of, read_lines, read_record
from megatron_flex.data.turns import Turns
from megatron_flex.signals import run_tool
from megatron_flex.tokenizers.base import Tokenizer, TokenizerError
from megatron_flex.tokenizers.build import TYPES, build_tokenizer
from megatron_flex.tokenizers.chat_template import ChatTemplate, find_template, home

if TYPE_CHECKING:
    from megatron_flex.data.preprocess import PreprocessOptions


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description="Tokenize JSONL, Parquet or text files into Megatron's .bin/.idx files.",
        allow_abbrev=False,
    )
    group = result.add_argument_group("input data")
    group.add_argument(
        "--input",
        required=True,
        help="JSONL, .json array, .parquet or .txt file (one document), or pattern in quotes; .gz"
        " is unpacked",
    )
    group.add_argument(
        "--sample-format",
        choices=("text", CHAT),
        help="texts or conversations; default: what the first lines have, texts with --json-keys",
    )
    group.add_argument("--json-keys", nargs="+", help="texts to take; default: text")
    group.add_argument(
        "--split-sentences",
        action="store_true",
        help="split documents into sentences (by rule; needed for BERT's sentence order)",
    )
    group.add_argument(
        "--keep-newlines",
        action="store_true",
        help="with --split-sentences: leave white space between sentences in place",
    )
    group.add_argument(
        "--strict", action="store_true", help="stop at the first line that is not perfect"
    )
    group = result.add_argument_group("conversations")
    group.add_argument(
        "--chat-format",
        choices=FORMATS,
        help="keys of the lines: messages (role and content), conversations (ShareGPT: from and"
        " value), alpaca (instruction, input, output), prompt and completion; default: what each"
        " line has",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="jinja2 file; default: the tokenizer's own (chat_template.jinja or"
        " tokenizer_config.json beside it), else ChatML",
    )
    group.add_argument(
        "--loss-on",
        choices=("assistant", "all"),
        default="assistant",
        help="tokens that count in the loss: what the assistant says, ends of turns included"
        " (default), or all",
    )
    group = result.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, choices=TYPES)
    group.add_argument("--tokenizer-model", help="SentencePiece model, or tokenizer.json")
    group.add_argument("--vocab-file", help="vocab.json (GPT-2) or vocab.txt (BERT)")
    group.add_argument("--merge-file", help="merges.txt (GPT-2)")
    group.add_argument("--vocab-size", type=int, help="NullTokenizer: number of ids before the eod")
    group.add_argument(
        "--append-eod",
        action="store_true",
        help="end each document with the eod token; of a pair of prompt and completion only the"
        " latter",
    )
    group.add_argument(
        "--append-eod-keys",
        nargs="+",
        metavar="KEY",
        help="with --append-eod: only for these keys, such as the second of a pair with names of"
        " its own",
    )
    group = result.add_argument_group("output data")
    group.add_argument("--output-prefix", required=True, help="path without _{key}_document.bin")
    group = result.add_argument_group("runtime")
    group.add_argument("--workers", type=int, required=True, help="processes, in all partitions")
    group.add_argument("--partitions", type=int, default=1, help="shares that are written at once")
    group.add_argument(
        "--log-interval", type=int, default=1000, help="documents between updates of the counts"
    )
    group.add_argument(
        "--keep-sequential-samples",
        action="store_true",
        help="with --partitions: keep the order of the lines",
    )
    return result


def options(words: list[str] | None = None) -> PreprocessOptions:
    """Read and check the command line.

    Raises:
        DataError, TokenizerError: something cannot be.
    """
    # Imported here because it loads PyTorch, and each worker process imports this file.
    from megatron_flex.data.preprocess import PreprocessOptions

    flags = parser().parse_args(words)
    inputs = files_of(flags.input)
    if flags.append_eod_keys and not flags.append_eod:
        raise DataError("--append-eod-keys has no effect without --append-eod")
    chat_flags = [f"--{n.replace('_', '-')}" for n in _CHAT_FLAGS if getattr(flags, n)]
    if flags.json_keys and flags.sample_format == CHAT:
        raise DataError("--json-keys is for texts: remove it, or --sample-format chat")
    if flags.sample_format is None and (flags.json_keys or chat_flags):
        flags.sample_format = CHAT if chat_flags and not flags.json_keys else "text"
    if chat_flags and flags.sample_format == "text":
        raise DataError(f"{chat_flags[0]} is for conversations: remove it, or --json-keys")
    flags.json_keys = flags.json_keys or ["text"]
    unknown = set(flags.append_eod_keys or ()) - set(flags.json_keys)
    if unknown:
        raise DataError(f"--append-eod-keys {', '.join(sorted(unknown))}: not in --json-keys")
    if flags.keep_newlines and not flags.split_sentences:
        raise DataError("--keep-newlines has no effect without --split-sentences")
    if flags.log_interval < 1:
        raise DataError("--log-interval must be at least 1")
    make = partial(
        build_tokenizer,
        flags.tokenizer_type,
        tokenizer_model=flags.tokenizer_model,
        vocab_file=flags.vocab_file,
        merge_file=flags.merge_file,
        vocab_size=flags.vocab_size,
    )
    tokenizer = make()
    chat = None
    if _is_chat(flags, inputs):
        chat, keys = _chat(flags, inputs, tokenizer), (CHAT,)
        eod_keys: tuple[str, ...] = keys if flags.append_eod else ()
    else:
        keys = tuple(dict.fromkeys(flags.json_keys))
        eod_keys = _eod_keys(keys, flags.append_eod_keys) if flags.append_eod else ()
    if flags.tokenizer_type.startswith("Bert") and not flags.split_sentences:
        print(
            "note: without --split-sentences, BERT has no sentence order (--bert-no-binary-head)",
            file=sys.stderr,
        )
    return PreprocessOptions(
        inputs=tuple(inputs),
        output_prefix=flags.output_prefix,
        make_tokenizer=make,
        vocab_size=tokenizer.vocab_size,
        chat=chat,
        encode=EncodeOptions(
            keys=keys,
            split_sentences=flags.split_sentences,
            keep_newlines=flags.keep_newlines,
            eod_keys=eod_keys,
            prompt_keys=_prompt_keys(keys, flags.append_eod_keys),
            strict=flags.strict,
        ),
        workers=flags.workers,
        partitions=flags.partitions,
        keep_sequential_samples=flags.keep_sequential_samples,
        log_interval=flags.log_interval,
    )


_CHAT_FLAGS = ("chat_format", "chat_template")
_LOOKED_AT = 100  # lines from which the form of the data is found


def _first_records(inputs: list[str]) -> list[dict[str, object]]:
    """Records at the beginning of the first file."""
    lines = islice(read_lines(inputs[0]), _LOOKED_AT)
    found = (read_record(line.content, first=line.number == 1)[0] for line in lines)
    return [record for record in found if record is not None]


def _is_chat(flags: argparse.Namespace, inputs: list[str]) -> bool:
    """Whether lines are conversations: what is said, else what the first record has."""
    if flags.sample_format is None:
        record = next(iter(_first_records(inputs)), {})
        flags.sample_format = "text" if "text" in record or not formats_of(record) else CHAT
    if flags.sample_format == "text":
        return False
    if flags.split_sentences or flags.append_eod_keys:
        given = "--split-sentences" if flags.split_sentences else "--append-eod-keys"
        raise DataError(f"{given} is not for conversations (--sample-format chat): remove it")
    return True


def _chat(flags: argparse.Namespace, inputs: list[str], tokenizer: Tokenizer) -> ChatOptions:
    """How conversations are read, said where it was found."""
    form = flags.chat_format
    if form is None:
        records = _first_records(inputs)
        forms = next((f for record in records if (f := formats_of(record))), ())
        if len(forms) != 1:
            keys = f"the keys {', '.join(records[0])}" if records else "no JSON object"
            what = (
                f"may be any of {', '.join(forms)}: give --chat-format"
                if forms
                else f"have {keys}. Conversations have messages, or conversations, or instruction"
                " and output, or prompt and completion: docs/finetuning.md"
            )
            raise DataError(f"--input {inputs[0]}: its first lines {what}")
        form = forms[0]
    directory = home(flags.tokenizer_model or flags.vocab_file)
    source = find_template(tokenizer, directory, flags.chat_template)
    print(f"conversations ({form}), written by the chat template of {source.origin}")
    turns = Turns(ChatTemplate(source))
    if not source.own:
        print(
            "note: the tokenizer has no chat template, so it is ChatML: --chat-template gives"
            " another",
            file=sys.stderr,
        )
    for piece in (turns.start.strip(), turns.end):
        if piece not in tokenizer.decode(tokenizer.encode(piece)):
            print(
                f"warning: the tokenizer cannot write {piece!r} of the chat template: give a"
                " template that was made for it (--chat-template), or add the tokens to it",
                file=sys.stderr,
            )
    if turns.end and (pieces := len(tokenizer.encode(turns.end))) > 1:
        print(
            f"note: {turns.end!r}, which ends an answer, is {pieces} tokens of this tokenizer: the"
            " model has to learn all of them",
            file=sys.stderr,
        )
    if flags.loss_on == "assistant" and turns.remark:
        print(f"note: {turns.remark}", file=sys.stderr)
    named = flags.chat_format is not None
    return ChatOptions(form, source, everything=flags.loss_on == "all", named=named)


def _prompt_keys(keys: tuple[str, ...], chosen: list[str] | None) -> tuple[str, ...]:
    """Keys whose documents should not end with the eod token, because something follows them."""
    pair = {"prompt"} if {"prompt", "completion"} <= set(keys) else set()
    left_out = set(keys) - set(chosen) if chosen else set()
    return tuple(key for key in keys if key in pair | left_out)


def _eod_keys(keys: tuple[str, ...], chosen: list[str] | None) -> tuple[str, ...]:
    """Keys whose documents end with the eod token."""
    return tuple(chosen) if chosen else tuple(k for k in keys if k not in _prompt_keys(keys, None))


def main(words: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    # megatron-core says so at import; it plays no part here.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    from megatron_flex.data.preprocess import preprocess

    try:
        chosen = options(words)
        report = preprocess(chosen)
    except (DataError, TokenizerError, OSError) as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        return 1
    for line in report.lines():
        print(line)
    for note, count in report.notes.items():
        if note.endswith(ENDED):
            print(
                f"warning: {note} ({count} times): remove it from the texts, or leave the key out"
                " of --append-eod-keys",
                file=sys.stderr,
            )
    for key in chosen.encode.keys:
        print(f"written: {chosen.prefix(key)}.bin and .idx")
    if chosen.chat is not None:
        prefix = shlex.quote(chosen.prefix(CHAT))
        print(f"train on it with --sample-format chat --data-path {prefix}")
    return 0


if __name__ == "__main__":
    run_tool(main)
