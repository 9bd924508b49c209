"""Loader of Hugging Face directories (config.json and safetensors), for convert.py."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_flex.checkpoint.conversion.hugging_face.directory import (
    ReadOptions,
    read_hugging_face,
)
from megatron_flex.checkpoint.conversion.messages import Queue, send


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this loader."""
    group = parser.add_argument_group("loader hf")
    group.add_argument(
        "--max-position-embeddings",
        type=int,
        metavar="N",
        help="longest sample of a rotary model, where config.json allows more: a model with a"
        " sliding window of N tokens is then one without",
    )
    group.add_argument(
        "--ignore-fields",
        nargs="+",
        default=[],
        metavar="NAME",
        help="fields of config.json that are unknown and do not change what the model computes",
    )


def load_checkpoint(queue: Queue, args: Namespace) -> None:
    """Send the weights through ``queue``."""
    options = ReadOptions(tuple(args.ignore_fields), args.max_position_embeddings, args.checking)
    send(queue, read_hugging_face(Path(args.load_dir), args.model_type, options))
