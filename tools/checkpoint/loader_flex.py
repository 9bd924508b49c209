"""Loader of this program's checkpoints, for convert.py."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_flex.checkpoint.conversion.flex import read_flex
from megatron_flex.checkpoint.conversion.messages import Queue, send


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this loader."""
    group = parser.add_argument_group("loader flex")
    group.add_argument("--ckpt-step", type=int, help="iteration to load instead of the newest")


def load_checkpoint(queue: Queue, args: Namespace) -> None:
    """Send the weights through ``queue``."""
    directory, wanted = Path(args.load_dir), getattr(args, "optimizer", False)
    send(queue, read_flex(directory, iteration=args.ckpt_step, optimizer=wanted))
