"""Saver of Megatron-LM's format torch (mp_rank_XX/model_optim_rng.pt), for convert.py."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_flex.checkpoint.conversion.legacy import write_legacy
from megatron_flex.checkpoint.conversion.messages import Queue, receive
from megatron_flex.checkpoint.conversion.weights import padded_size

TAKES_OPTIMIZER = True


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this saver: Megatron-LM's names and defaults."""
    group = parser.add_argument_group("saver core")
    group.add_argument(
        "--target-tensor-parallel-size", type=int, help="default: that of the source, or 1"
    )
    group.add_argument(
        "--target-pipeline-parallel-size", type=int, help="default: that of the source, or 1"
    )
    group.add_argument(
        "--saver-transformer-impl",
        default="transformer_engine",
        choices=["local", "transformer_engine"],
        help="layer specification that will load the result; default transformer_engine",
    )


def save_checkpoint(queue: Queue, args: Namespace) -> None:
    """Write what comes through ``queue``."""
    weights = receive(queue, checking=args.checking)
    size = args.target_tensor_parallel_size or weights.tensor_parallel_size
    divisible_by = getattr(weights.arguments, "make_vocab_size_divisible_by", 128)
    path = write_legacy(
        Path(args.save_dir),
        weights.padded(padded_size(weights.config.vocab_size, divisible_by, size)),
        tensor_parallel_size=size,
        pipeline_parallel_size=(
            args.target_pipeline_parallel_size or weights.pipeline_parallel_size
        ),
        transformer_engine=args.saver_transformer_impl == "transformer_engine",
    )
    print(f"wrote {path}")
