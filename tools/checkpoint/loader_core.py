"""Loader of Megatron-LM's checkpoints of megatron-core models, for convert.py.

Tells by itself whether they are in the format torch or torch_dist, which layer specification they
were written with, and how they are cut.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_flex.checkpoint.conversion.legacy import read_legacy, source_directory
from megatron_flex.checkpoint.conversion.messages import Queue, send
from megatron_flex.checkpoint.conversion.torch_dist import read_torch_dist


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this loader."""
    group = parser.add_argument_group("loader core")
    group.add_argument("--ckpt-step", type=int, help="iteration to load instead of the newest")
    group.add_argument(
        "--true-vocab-size",
        type=int,
        help="size of the tokenizer, without the rows that pad the embedding; needed where the"
        " checkpoint's arguments lack it",
    )


def load_checkpoint(queue: Queue, args: Namespace) -> None:
    """Send the weights through ``queue``."""
    directory = Path(args.load_dir)
    distributed = (source_directory(directory, args.ckpt_step) / "metadata.json").exists()
    read = read_torch_dist if distributed else read_legacy
    weights = read(
        directory,
        args.model_type,
        iteration=args.ckpt_step,
        true_vocab_size=args.true_vocab_size,
        optimizer=getattr(args, "optimizer", False),
    )
    send(queue, weights)
