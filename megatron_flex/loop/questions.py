"""Tools that take a training command's own flags: what would this do with my data?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megatron_flex.arguments import TENSOR_SIZE, ArgumentsError, automatic_tensor_size, parse
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.load import read_common
from megatron_flex.config.config import GROUPS, Config, all_options
from megatron_flex.config.derive import MODEL_FIELDS
from megatron_flex.config.option import options
from megatron_flex.data.cut import Cut
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.loop.assemble import Parts, assemble
from megatron_flex.loop.cutting import run_cut
from megatron_flex.loop.lengths import Lengths
from megatron_flex.loop.opening import data_lines, model_line, sizes
from megatron_flex.loop.starting import source_arguments
from megatron_flex.loop.tensor_size import chosen_size
from megatron_flex.planner.flops import cost_coefficients
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.ways import micro_batches

ABOUT = (
    "Or give the flags of a training command as they stand (pretrain_gpt.py's), or --load DIRECTORY"
    " --use-checkpoint-args for those of a checkpoint; then model and data are the run's, and flags"
    " of both have the trainer's meaning."
)
_UNMEASURED = " costs of layers: as the devices are described; training will measure its own first"
_MARKS = ("--num-layers", "--use-checkpoint-args", "--load-hf")
_DATA = ("train_data_path", "valid_data_path", "test_data_path", "data_args_path",
         "per_split_data_args_path", "data_path", "mock_data", "split")  # fmt: skip
_ALSO = ("micro_batch_size", "micro_batch_tokens", "global_batch_size", "seed", "bf16")


@dataclass(frozen=True)
class Run:
    """A training command, looked at.

    Attributes:
        told: whether it was said for how many workers.
    """

    config: Config
    parts: Parts
    told: bool = True

    @property
    def coefficients(self) -> CostCoefficients:
        """By which its micro-batches are cut."""
        return cost_coefficients(self.parts.model)

    @property
    def cut(self) -> Cut:
        """How its batches are cut."""
        parts = self.parts
        return run_cut(self.config, self.coefficients, parts.model, parts.profile)

    def lengths(self, number: int) -> list[tuple[int, ...]]:
        """Sample lengths of its first batches, in the order of training."""
        source = self.parts.train
        assert source is not None, "training flags have training data"
        lengths = Lengths(source, 0, 0, self.config.training.batch_sizes.size)
        return [lengths.of(iteration) for iteration in range(number)]

    def micro_batches(self, lengths: Sequence[int], plan: Plan) -> tuple[MicroBatch, ...]:
        """Of samples of these lengths, as its flags cut them, or where they leave it the plan."""
        return micro_batches(self.cut, lengths, plan.cut)

    def lines(self) -> list[str]:
        """The model and the data in words, as the run would begin with."""
        source = self.parts.train
        assert source is not None
        number = self.config.devices
        workers = f" workers: {number}, those of the flags' pipeline; --workers N says for how many"
        return [
            model_line(self.config, self.parts),
            *data_lines(self.config, source, sizes(source)),
            *(f" warning: {text}" for text in self.parts.warnings),
            *([] if self.told else [workers]),
            *([_UNMEASURED] if self.config.flexpipe.measures else []),
        ]


def asked_of_a_run(argv: Sequence[str] | None) -> bool:
    """Whether the words are a training command's flags."""
    words = sys.argv[1:] if argv is None else argv
    return any(word.partition("=")[0] in _MARKS for word in words)


def read_run(
    parser: Callable[[bool], argparse.ArgumentParser], argv: Sequence[str] | None
) -> tuple[argparse.Namespace, Run | None]:
    """A tool's own flags, and the run that the others describe, if they do.

    Args:
        parser: makes the tool's parser; given true, one with its flags beside a run's.

    Raises:
        SystemExit: what is wrong, in words.
        DataError, PlanError, TokenizerError: as :func:`megatron_flex.loop.assemble.assemble`.
    """
    if not asked_of_a_run(argv):
        return parser(False).parse_args(argv), None
    own = parser(True)
    own.add_argument("--workers", type=int, help="of the run; default: those of a pipeline")
    own.add_argument("--architecture", choices=["gpt", "bert"], default="gpt")
    taken = {flag for option in all_options() for flag in option.flags}
    assert not taken & own._option_string_actions.keys(), "a flag would have two meanings"
    args, rest = own.parse_known_args(argv)
    words = _completed(rest)
    if args.workers is not None and args.workers < 1:
        raise SystemExit("--workers must be at least 1")
    if args.workers is None and automatic_tensor_size(words):
        raise SystemExit(f"{' '.join(TENSOR_SIZE)} needs --workers, the number of them")
    size = args.workers
    if size is None:
        stages = _value(words, "--pipeline-model-parallel-size", 1)
        size = stages * _value(words, "--tensor-model-parallel-size", 1)
    try:
        config = parse(
            words, architecture=args.architecture, world_size=size, saved_values=_saved_values,
            tensor_size=partial(chosen_size, out=sys.stderr),
        )  # fmt: skip
    except ArgumentsError:
        raise SystemExit(2) from None  # it has been said
    return args, Run(config, assemble(config), told=args.workers is not None)


def _completed(words: Sequence[str]) -> list[str]:
    """With what a checkpoint says of data and batches, and what plays no part here."""
    found = list(words)
    flags = {option.field: option for option in all_options()}

    def has(field: str) -> bool:
        names = flags[field].flags
        return any(word.partition("=")[0] in names for word in found)

    if has("use_checkpoint_args") and has("load"):
        saved = _saved(found)
        names = [o.field for o in options(GROUPS["data"])] + list(_ALSO)
        if any(map(has, _DATA)):
            names = [name for name in names if name not in _DATA]
        if has("micro_batch_size") or has("micro_batch_tokens"):
            names = [name for name in names if not name.startswith("micro_batch")]
        if not any(has(n) or saved.get(n) for n in ("micro_batch_size", "micro_batch_tokens")):
            # The run's planner, or its slices, say how batches are cut.
            names.append("flexpipe_slice_tokens")
        layouts = ("flexpipe_plan", "flexpipe_plans", "pipeline_model_parallel_size")
        if not any(map(has, layouts)):
            names.append("flexpipe")
        if saved.get("data_args_path") or saved.get("per_split_data_args_path"):
            drop = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
            names = [name for name in names if name not in drop]
        for name in names:
            option, value = flags[name], saved.get(name)
            value = tuple(value) if isinstance(value, list) else value
            if name in MODEL_FIELDS or has(name) or value is None or value == option.default:
                continue
            if option.switch is not None:
                found.append(option.flag)
            else:
                found += [option.flag, *map(str, value if isinstance(value, tuple) else (value,))]
    if not has("train_iters") and not has("train_samples"):
        found += ["--train-iters", "1"]
    if not has("lr"):
        found += ["--lr", "1"]
    return found


def _saved(words: Sequence[str]) -> Mapping[str, Any]:
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("--load")
    known.add_argument("--ckpt-step", type=int)
    given, _ = known.parse_known_args(list(words))
    try:
        arguments: Mapping[str, Any] = read_common(given.load, given.ckpt_step)["arguments"]
    except CheckpointError as error:
        raise SystemExit(f"--use-checkpoint-args: {error}") from error
    return arguments


def _saved_values(config: Config) -> Mapping[str, Any]:
    try:
        return source_arguments(config, converts=False)
    except CheckpointError as error:
        raise ArgumentsError([f"--use-checkpoint-args: {error}"]) from error


def _value(words: Sequence[str], flag: str, default: int) -> int:
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument(flag, type=int, default=default, dest="value")
    return int(known.parse_known_args(list(words))[0].value)


def heaviest(batches: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The batch with the longest sample."""
    return max(batches, key=lambda lengths: (max(lengths), np.square(lengths).sum()))
