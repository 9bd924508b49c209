"""The command line: Megatron-named flags in, one checked :class:`Config` out.

Flags are generated from the groups of ``megatron_flex/config``. Everything that can be wrong with
a command line is found here, before anything is allocated, and reported in one message.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from megatron_flex.config.config import GROUPS, Architecture, Config, all_options, flag_of
from megatron_flex.config.derive import MODEL_FIELDS, OF_THE_RUN, derive
from megatron_flex.config.flexpipe import V_SCHEDULES
from megatron_flex.config.option import Option, options
from megatron_flex.config.refused import BY_FLAG, VALUES
from megatron_flex.config.validate import problems
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.model.tensor_cut import check
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.static import REFERENCE_LENGTH, recomputed, static_plan
from megatron_flex.runtime.words import say_once

TENSOR_SIZE = ("--tensor-model-parallel-size", "auto")
"""A flag and its value that leaves it to the cost model, which decides before anything starts."""
NOMINAL_VOCABULARY = 32768
"""Stands in for the tokenizer's size where only the cut into stages is checked."""


class ArgumentsError(SystemExit):
    """A command line that cannot be run: exit status 2, the message says what to change."""

    def __init__(self, messages: Iterable[str]) -> None:
        super().__init__(2)
        self.messages = tuple(messages)

    def __str__(self) -> str:
        if len(self.messages) == 1:
            return self.messages[0]
        lines = (f"  {number}. {text}" for number, text in enumerate(self.messages, 1))
        return "\n".join((f"{len(self.messages)} things to change:", *lines))


class _Parser(argparse.ArgumentParser):
    """argparse prints hundreds of flags with each error; one message is enough."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentsError([message])


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags. Flags that are not given leave no attribute behind."""
    parser = _Parser(
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        usage="%(prog)s [flags]",
        description="Flags have Megatron-LM's names, meaning and defaults (0.16), except where"
        " their text says otherwise. docs/flags.md lists those of Megatron-LM that are refused.",
    )
    for name, group in GROUPS.items():
        title = parser.add_argument_group(name.replace("_", " "), group.__doc__)
        for option in options(group):
            title.add_argument(*option.flags, **_argument(option))
    return parser


def parse(
    argv: Sequence[str] | None = None,
    *,
    architecture: Architecture = "gpt",
    world_size: int | None = None,
    saved_values: Callable[[Config], Mapping[str, Any]] | None = None,
    tensor_size: Callable[[Callable[[int], Config], int], int] | None = None,
) -> Config:
    """Read, derive and check a command line.

    Args:
        argv: the words after the program's name; ``None`` takes those of this process.
        architecture: which model the entry point trains.
        world_size: number of workers; ``None`` takes ``WORLD_SIZE`` of the environment, else 1.
        saved_values: with ``--use-checkpoint-args``, reads what :meth:`Config.values` was when the
            checkpoint was written. It gets a configuration whose checkpoint options count. With
            ``--load-hf`` it adds ``pretrained_checkpoint``, where the converted weights are.
        tensor_size: with ``--tensor-model-parallel-size auto``, chooses the size. It gets what
            makes the configuration with a size, and the number of workers.

    Raises:
        ArgumentsError: exit status 2, after one worker of each server has printed all that has to
            be changed.
    """
    words = list(sys.argv[1:] if argv is None else argv)

    def build(words: Sequence[str]) -> Config:
        return _parsed(words, architecture, workers, saved_values)

    try:
        workers = _world_size() if world_size is None else world_size
        if tensor_size is not None:
            size = 1
            if automatic_tensor_size(words):
                size = tensor_size(lambda n: build(with_tensor_size(words, n)), workers)
            words = with_tensor_size(words, size)
        return build(words)
    except ArgumentsError as error:
        name = os.path.basename(sys.argv[0]) if argv is None else "arguments"
        say_once(f"{name}: error: {error}")
        raise


def _parsed(
    words: Sequence[str],
    architecture: Architecture,
    world_size: int,
    saved_values: Callable[[Config], Mapping[str, Any]] | None,
) -> Config:
    values = _read(words)
    given = frozenset(values)
    wanted = values.get("use_checkpoint_args") and given & {"load", "pretrained_checkpoint"}
    if saved_values is not None and (wanted or "load_hf" in given):
        _check_source(given)
        early = Config.from_values(architecture, world_size, _placeholders() | values, given)
        saved = saved_values(early)
        values |= _from_checkpoint(values, saved)
        if "load_hf" in given:
            values["pretrained_checkpoint"] = saved.get("pretrained_checkpoint")
    return _build(values, given, architecture, world_size)


def automatic_tensor_size(words: Sequence[str]) -> bool:
    """Whether the words of a command line leave open how many workers share each layer.

    As everywhere, the last of several values counts.
    """
    flag, automatic = TENSOR_SIZE
    value = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        name, joined, text = word.partition("=")
        if name == flag:
            value = text if joined else following
    return value == automatic


def with_tensor_size(words: Sequence[str], size: int) -> list[str]:
    """The words with a size where they say ``auto``; sequence parallelism needs more than one."""
    flag, automatic = TENSOR_SIZE
    found = [w.replace(f"{flag}={automatic}", f"{flag}={size}") for w in words]
    for i, word in enumerate(found[1:], 1):
        if word == automatic and found[i - 1] == flag:
            found[i] = str(size)
    if size == 1 and automatic_tensor_size(words):
        found = [word for word in found if word != "--sequence-parallel"]
    return found


def plan_of(config: Config, model: ModelConfig, *, length: float | None = None) -> Plan:
    """The static plan that the flags ask for.

    Args:
        config: the configuration.
        model: the model's shape.
        length: token pairs per token of the data, ``sum(l**2) / sum(l)``, which weighs attention in
            the cut; ``None``: a typical value.

    Raises:
        PlanError: when there is no such plan; the message names the flag to change.
    """
    if config.flexpipe.flexpipe_plan is not None:
        try:
            plan = Plan.parse(config.flexpipe.flexpipe_plan)
            plan.check(model.layers.num_units, config.devices)
        except PlanError as error:
            raise PlanError(f"--flexpipe-plan: {error}{config.parallel.device_note}") from None
        return _optimised(config, plan, model)
    p = config.parallel
    plan = static_plan(
        model,
        p.pipeline_model_parallel_size,
        config.devices,
        first_layers=p.decoder_first_pipeline_num_layers,
        last_layers=p.decoder_last_pipeline_num_layers,
        layout=p.pipeline_model_parallel_layout,
        length=REFERENCE_LENGTH if length is None else length,
        rounds=config.stages_per_worker,
        v=config.schedule in V_SCHEDULES,
    )
    return _optimised(config, plan, model)


def _optimised(config: Config, plan: Plan, model: ModelConfig) -> Plan:
    """The plan with what the flags recompute and shard."""
    r = config.recompute
    if config.parallel.use_distributed_optimizer:
        plan = plan.sharded()
    if r.selective:
        kinds = {{"core_attn": Kind.ATTENTION, "mlp": Kind.MLP}[name] for name in r.halves}
        return recomputed(plan, model.layers, kinds)
    if r.recompute_granularity is None:
        return plan
    first = r.recompute_num_layers if r.recompute_method == "block" else None
    return recomputed(plan, model.layers, {Kind.ATTENTION, Kind.MLP}, first)


def dump(config: Config) -> str:
    """All options in the form in which Megatron-LM prints its arguments."""
    lines = [
        f"  {name} {'.' * (48 - len(name))} {value}" for name, value in config.values().items()
    ]
    title = "arguments"
    return "\n".join(
        (
            f"------------------------ {title} ------------------------",
            *sorted(lines, key=str.lower),
            f"-------------------- end of {title} ---------------------",
        )
    )


def _argument(option: Option) -> dict[str, Any]:
    """Keyword arguments of ``add_argument``."""
    text = f"{option.help} ({option.default_text})".replace("%", "%%")
    common = {"dest": option.field, "help": text}
    if option.switch is not None:
        return {**common, "action": "store_const", "const": option.switch}
    word = option.takes.split()[0]
    count = {} if option.count is None else {"nargs": option.count}
    return {**common, **count, "type": _converter(option), "metavar": word}


def _converter(option: Option) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return option.convert(text)
        except ValueError as error:
            reasons = VALUES.get(option.flag, {})
            reason = reasons.get(text, reasons.get("", ""))
            message = f"{text}: {reason}" if reason else str(error)
            raise argparse.ArgumentTypeError(message) from None

    return convert


def _read(argv: Sequence[str]) -> dict[str, Any]:
    """The given values by field name."""
    namespace, rest = build_parser().parse_known_args(list(argv))
    if rest:
        raise ArgumentsError(_unknown(rest))
    return {name: tuple(v) if isinstance(v, list) else v for name, v in vars(namespace).items()}


def _unknown(words: Sequence[str]) -> list[str]:
    """What to say about words that no flag takes."""
    flags = [word.partition("=")[0] for word in words if _is_flag(word)]
    if not flags:
        return [f"'{' '.join(words)}' follows no flag that takes it: remove it"]
    known = [flag for option in all_options() for flag in option.flags]
    refused: dict[str, list[str]] = {}
    messages = []
    for flag in dict.fromkeys(flags):
        if flag in BY_FLAG:
            refused.setdefault(str(BY_FLAG[flag]), []).append(flag)
            continue
        close = difflib.get_close_matches(flag, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "--help lists all flags"
        messages.append(f"{flag} is unknown: {hint}")
    return messages + [
        f"{', '.join(names)} cannot be used: {why}" for why, names in refused.items()
    ]


def _is_flag(word: str) -> bool:
    if not word.startswith("-"):
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentsError([f"WORLD_SIZE is '{text}' in the environment: it must be at least 1"])
    return int(text)


def _check_source(given: frozenset[str]) -> None:
    if "load_hf" in given and "pretrained_checkpoint" in given:
        raise ArgumentsError(["give --load-hf or --pretrained-checkpoint, not both"])
    if "load_hf" in given and "save" not in given:
        raise ArgumentsError(["--load-hf converts the model into --save: give that directory too"])


def _from_checkpoint(given: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the model and the tokenizer that a checkpoint was written with."""
    taken = {
        name: _plain(saved[name])
        for name in MODEL_FIELDS
        if name in saved and not (name in OF_THE_RUN and name in given)
    }
    what, else_ = "checkpoint", ", or --use-checkpoint-args"
    if "load_hf" in given:
        what, else_ = "model", ""
    wrong = [
        f"{flag_of(name)} is {given[name]}, but the {what} has {value}: remove the flag{else_}"
        for name, value in taken.items()
        if name in given and given[name] != value
    ]
    if wrong:
        raise ArgumentsError(wrong)
    return taken


def _build(
    given_values: Mapping[str, Any],
    given: frozenset[str],
    architecture: Architecture,
    world_size: int,
) -> Config:
    values = dict(given_values)
    missing = [o.flag for o in all_options() if o.extra.required and o.field not in values]
    wrong = [f"give {', '.join(missing)}"] if missing else []
    wrong += derive(values, world_size)
    if wrong:
        raise ArgumentsError(wrong)
    config = Config.from_values(architecture, world_size, values, given)
    wrong = problems(config)
    if not wrong:
        try:
            model = config.model_config(_nominal_vocabulary(config))
            t = config.tokenizer
            known = t.vocab_size is not None or t.padded_vocab_size is not None
            check(model, config.parallel.tensor_model_parallel_size, vocabulary=known)
            plan_of(config, model)
        except (PlanError, ValueError) as error:
            wrong = [str(error)]
    if wrong:
        raise ArgumentsError(wrong)
    return config


def _nominal_vocabulary(config: Config) -> int:
    t = config.tokenizer
    if t.vocab_size is not None:
        return t.vocab_size
    limit = t.padded_vocab_size or NOMINAL_VOCABULARY + t.vocab_extra_ids
    return max(1, limit - t.vocab_extra_ids)


def _placeholders() -> dict[str, Any]:
    """Values for what is required or derived, where only the checkpoint options count."""
    empty = {int: 1, float: 1.0, str: "", bool: False}
    return {o.field: empty[o.kind] for o in all_options() if o.extra.required or o.extra.derived}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
