"""Saver of Megatron-LM's distributed checkpoints (torch_dist), for convert.py."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_flex.checkpoint.conversion.messages import Queue, receive
from megatron_flex.checkpoint.conversion.torch_dist import write_torch_dist

TAKES_OPTIMIZER = True


def add_arguments(parser: ArgumentParser) -> None:
    """This saver has no flags: the format does not depend on how a model is cut."""


def save_checkpoint(queue: Queue, args: Namespace) -> None:
    """Write what comes through ``queue``."""
    path = write_torch_dist(Path(args.save_dir), receive(queue, checking=args.checking))
    print(f"wrote {path}")
