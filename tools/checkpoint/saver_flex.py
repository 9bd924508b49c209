"""Saver of this program's checkpoints, for convert.py."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_flex.checkpoint.conversion.flex import write_flex
from megatron_flex.checkpoint.conversion.messages import Queue, receive_lazily

TAKES_OPTIMIZER = True


def add_arguments(parser: ArgumentParser) -> None:
    """This saver has no flags: its checkpoints do not depend on how a model is cut."""


def save_checkpoint(queue: Queue, args: Namespace) -> None:
    """Write what comes through ``queue``."""
    path = write_flex(Path(args.save_dir), receive_lazily(queue, checking=args.checking))
    print(f"wrote {path}")
