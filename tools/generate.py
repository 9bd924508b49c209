#!/usr/bin/env python3
"""Complete prompts with a checkpoint or a Hugging Face model, in one process.

    python tools/generate.py --load runs/demo/checkpoints --prompts "def main(" "import "
    python tools/generate.py --load-hf runs/tuned/model --chat --prompts "Who are you?" \
        --temperature 0.7 --top-p 0.9 --seed 1
    python tools/generate.py --load runs/tuned/checkpoints --prompt-file questions.jsonl \
        --output-path answers.jsonl

Checkpoints may come from any layout; tools/checkpoint/convert.py makes them of Megatron-LM's. A
line of --prompt-file is a JSON object with "text", or with "messages" (which the chat template
writes), or the prompt as it is. With --chat a text is what a user says. Nothing is put before a
text: a model that wants its begin token gets it by that token's name at the beginning of the text.

A completion ends with the end-of-document token, with what ends an answer in the chat template, or
with a token that generation_config.json names. The likeliest token is taken, or with any of
--temperature, --top-k and --top-p one is drawn, which depends on --seed and on the number of the
prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_flex.checkpoint.conversion.flex import read_flex
from megatron_flex.checkpoint.conversion.hugging_face.companions import CONFIG
from megatron_flex.checkpoint.conversion.hugging_face.directory import (
    ReadOptions,
    read_hugging_face,
)
from megatron_flex.checkpoint.conversion.hugging_face.families import family_of
from megatron_flex.checkpoint.conversion.hugging_face.files import read_json
from megatron_flex.checkpoint.conversion.weights import Weights
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.data.bar import SHORT, progress_bar
from megatron_flex.data.errors import DataError
from megatron_flex.data.prompts import Asked, Prompt, Prompts, read_asked
from megatron_flex.loop.local_model import end_tokens, local_blocks
from megatron_flex.model.decode import Completion, complete, room
from megatron_flex.model.sampling import Sampler, Sampling
from megatron_flex.signals import run_tool
from megatron_flex.telemetry.files import replace
from megatron_flex.tokenizers.base import Tokenizer, TokenizerError
from megatron_flex.tokenizers.build import TYPES, build_tokenizer
from megatron_flex.tokenizers.chat_template import find_template, home

_FILES = ("tokenizer_model", "vocab_file", "merge_file")
_NO_BERT = "a BERT fills in masks: only a GPT completes texts"


def parser() -> argparse.ArgumentParser:
    """The command line; names are those of Megatron-LM's generation examples."""
    result = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = result.add_argument_group("model")
    which = group.add_mutually_exclusive_group(required=True)
    which.add_argument("--load", type=Path, metavar="DIR", help="directory of checkpoints")
    which.add_argument("--load-hf", type=Path, metavar="DIR", help="Hugging Face directory")
    group.add_argument("--ckpt-step", type=int, help="iteration to load instead of the newest")
    group = result.add_argument_group("prompts")
    group.add_argument("--prompts", nargs="+", default=[], metavar="TEXT", help="texts")
    group.add_argument("--prompt-file", metavar="FILE", help="a prompt a line, JSON or text")
    group.add_argument("--chat", action="store_true", help="a text is what a user says")
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="jinja2 file; default: the tokenizer's own, else ChatML",
    )
    group = result.add_argument_group("generation")
    group.add_argument("--num-tokens-to-generate", type=int, default=64, metavar="N",
                       help="for each prompt, at most; default 64")  # fmt: skip
    group.add_argument("--temperature", type=float, help="divides the logits; 0: no drawing")
    group.add_argument("--top-k", "--top_k", type=int, help="draw from the K likeliest tokens")
    group.add_argument("--top-p", "--top_p", type=float,
                       help="draw from the likeliest tokens of this probability")  # fmt: skip
    group.add_argument("--seed", type=int, default=1234, help="keys what is drawn; default 1234")
    group.add_argument("--output-path", type=Path, metavar="FILE",
                       help="write JSONL: prompt, completion, tokens")  # fmt: skip
    group = result.add_argument_group("tokenizer, where it is not the checkpoint's")
    group.add_argument("--tokenizer-type", choices=TYPES)
    for name in _FILES:
        group.add_argument(f"--{name.replace('_', '-')}", metavar="FILE")
    return result


def sampling_of(flags: Namespace) -> Sampling:
    """How tokens are chosen; drawing is asked for by any flag of it."""
    drawn = flags.top_k is not None or flags.top_p is not None
    temperature = flags.temperature
    if temperature is None:
        temperature = 1.0 if drawn else 0.0
    elif temperature == 0.0 and drawn:
        raise DataError("--top-k and --top-p have no effect with --temperature 0: remove it")
    try:
        return Sampling(temperature, flags.top_k or 0, flags.top_p or 0.0, flags.seed)
    except ValueError as error:
        raise DataError(str(error)) from error


def asked_of(flags: Namespace) -> list[Asked]:
    """All prompts: those of the flags, then those of the file."""
    found: list[Asked] = list(flags.prompts)
    if flags.prompt_file is not None:
        found += read_asked(flags.prompt_file, "--prompt-file")
    if not found:
        raise DataError("there is nothing to complete: give --prompts or --prompt-file")
    if flags.chat:
        found = [
            {"messages": [{"role": "user", "content": a}]} if isinstance(a, str) else a
            for a in found
        ]
    return found


def read_weights(flags: Namespace) -> Weights:
    """The model, whose tensors are read when they are asked for."""
    if flags.load is not None:
        return read_flex(flags.load, iteration=flags.ckpt_step)
    if flags.ckpt_step is not None:
        raise DataError("--ckpt-step is for --load: remove it")
    if family_of(read_json(flags.load_hf / CONFIG).get("model_type")).bert:
        raise DataError(_NO_BERT)
    return read_hugging_face(flags.load_hf, "GPT", ReadOptions(say=lambda _: None))


def tokenizer_of(flags: Namespace, weights: Weights) -> tuple[Tokenizer, Path | None, bool]:
    """The tokenizer, where its files lie, and whether it is one of texts."""
    values = {name: getattr(weights.arguments, name, None) for name in ("tokenizer_type", *_FILES)}
    if flags.tokenizer_type is not None:
        values = dict.fromkeys(values)
    given = {name: getattr(flags, name) for name in values}
    values |= {name: value for name, value in given.items() if value is not None}
    kind = values["tokenizer_type"] or "NullTokenizer"
    size = weights.config.vocab_size - 1 if kind == "NullTokenizer" else None
    tokenizer = build_tokenizer(kind, **{name: values[name] for name in _FILES}, vocab_size=size)
    directory = home(values["tokenizer_model"] or values["vocab_file"])
    return tokenizer, directory, values["tokenizer_type"] is not None


def record_of(prompt: Prompt, completion: Completion, said: str) -> dict[str, Any]:
    """What ``--output-path`` has of a prompt."""
    return {
        "prompt": prompt.text,
        "completion": said,
        "prompt_tokens": list(prompt.ids),
        "tokens": list(completion.tokens),
        "ended": completion.stop > 0,
    }


def generate(flags: Namespace) -> None:
    """Complete all prompts, and say each completion when it is there."""
    sampling, asked = sampling_of(flags), asked_of(flags)
    if flags.num_tokens_to_generate < 1:
        raise DataError("--num-tokens-to-generate must be at least 1")
    out: Path | None = flags.output_path
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise DataError(f"--output-path {out}: give a file in a directory that is there")
    weights = read_weights(flags)
    if weights.config.architecture != "gpt":
        raise DataError(_NO_BERT)
    tokenizer, directory, known = tokenizer_of(flags, weights)
    template = None
    if any(not isinstance(a, str) for a in asked):
        template = find_template(tokenizer, directory, flags.chat_template)
    elif flags.chat_template is not None:
        raise DataError("--chat-template is for conversations: add --chat, or remove it")
    prompts = Prompts(tokenizer, template)
    made = [prompts.make(a) for a in asked]
    rows = weights.config.vocab_size
    for prompt in made:
        if max(prompt.ids) >= rows:
            raise DataError(
                f"the prompt {prompt.text[:60]!r} has the token {max(prompt.ids)}, and the model"
                f" knows {rows}: the tokenizer is not the model's"
            )
    wanted = flags.num_tokens_to_generate
    try:
        most = [room(weights.config, len(prompt.ids), wanted) for prompt in made]
    except ValueError as error:
        raise DataError(str(error)) from error
    stops = prompts.stops() if known else []
    stops += [(token,) for token in end_tokens(flags.load_hf or weights.companions)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks = local_blocks(weights, device)
    records, began = [], time.perf_counter()
    with progress_bar(sum(most), "generate", unit=" tokens", delay=SHORT) as bar:
        for number, (prompt, limit) in enumerate(zip(made, most, strict=True)):
            choose = Sampler(sampling, number).choose
            completion = Completion(())
            for completion in complete(blocks, prompt.ids, limit, choose, stops):  # noqa: B007
                bar.update(1)
            bar.total -= limit - len(completion.tokens)
            said = prompts.said(completion.said)
            records.append(record_of(prompt, completion, said))
            print(f"prompt {number + 1}: {prompt.text}\ncompletion: {said}\n", flush=True)
    seconds = time.perf_counter() - began
    count = sum(len(record["tokens"]) for record in records)
    print(f"{count} tokens in {seconds:.1f} s ({count / seconds:.0f} a second)", file=sys.stderr)
    if out is not None:
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        replace(out, (line.encode() for line in lines))


def main(words: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    # megatron-core says so at import; it plays no part here.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    try:
        generate(parser().parse_args(words))
    except (CheckpointError, DataError, TokenizerError, OSError, ValueError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_tool(main)
