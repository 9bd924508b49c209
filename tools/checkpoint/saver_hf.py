"""Saver of Hugging Face directories (config.json and safetensors), for convert.py."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_flex.checkpoint.conversion.hugging_face.directory import (
    MAX_SHARD_SIZE,
    write_hugging_face,
)
from megatron_flex.checkpoint.conversion.messages import Queue, receive_lazily

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(text: str) -> int:
    """``5GB``, ``200MB`` or a number of bytes."""
    scale = _UNITS.get(text[-2:].upper(), 1)
    count = int(float(text if scale == 1 else text[:-2]) * scale)
    if count < 1:
        raise ValueError(text)
    return count


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this saver."""
    group = parser.add_argument_group("saver hf")
    group.add_argument(
        "--hf-model-type",
        metavar="TYPE",
        help="llama, mistral, qwen2, qwen3, gpt2, bert or megatron-bert; default: what it was"
        " converted from, or the first of them that has such a model",
    )
    group.add_argument(
        "--hf-source",
        type=Path,
        metavar="DIR",
        help="Hugging Face directory whose config.json and tokenizer files go along; default: that"
        " which the checkpoint was converted from",
    )
    group.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="jinja2 file that becomes the result's chat_template.jinja",
    )
    group.add_argument(
        "--params-dtype",
        choices=["float32", "bfloat16", "float16"],
        help="precision to write; default: that of the checkpoint",
    )
    group.add_argument(
        "--max-shard-size",
        type=_bytes,
        default=MAX_SHARD_SIZE,
        metavar="BYTES",
        help="size of one file, such as 5GB (the default)",
    )


def save_checkpoint(queue: Queue, args: Namespace) -> None:
    """Write what comes through ``queue``."""
    path = write_hugging_face(
        Path(args.save_dir),
        receive_lazily(queue, checking=args.checking),
        model_type=args.hf_model_type,
        source=args.hf_source,
        chat_template=args.chat_template,
        dtype=args.params_dtype,
        max_shard_size=args.max_shard_size,
    )
    print(f"wrote {path}")
