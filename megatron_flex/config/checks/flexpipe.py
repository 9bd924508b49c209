"""Flags of plans that change and of how batches are cut."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_flex.cluster.cluster import load as load_cluster
from megatron_flex.cluster.profile import Profile
from megatron_flex.config.checks.without import Problems, without
from megatron_flex.config.config import Config, flag_of
from megatron_flex.config.flexpipe import PADDED
from megatron_flex.data.cut import BY_WAY


def slices_problems(config: Config) -> Problems:
    given = config.flexpipe.flexpipe_slice_tokens
    if given != "auto" and not re.fullmatch(r"0|[1-9][0-9]{0,8}", given):
        yield f"--flexpipe-slice-tokens {given}: expected auto, 0 for never, or a number of tokens"
    elif given not in ("auto", "0") and config.architecture == "bert":
        yield (
            f"--flexpipe-slice-tokens {given}: BERT looks at all tokens of a sample at once, so its"
            " samples cannot be cut: leave the flag out"
        )


def batching_problems(config: Config) -> Problems:
    f, given, how = config.flexpipe, config.given, config.flexpipe.flexpipe_batching
    flag = f"--flexpipe-batching {how}"
    if f.flexpipe_baseline is not None:
        if "flexpipe_batching" not in given:
            flag = f"--flexpipe-baseline {f.flexpipe_baseline}"
        for name in ("flexpipe", "flexpipe_plans"):
            if name in given:
                yield f"--flexpipe-baseline keeps one plan: remove it, or {flag_of(name)}"
    size, tokens = config.training.micro_batch_size, config.data.micro_batch_tokens
    if how in ("pad", "pad-batch", "pad-all") and size is None:
        yield f"{flag} takes --micro-batch-size samples to a micro-batch: give that"
    if how in ("bucket", "slices") and (tokens is None and not (how == "slices" and f.flexpipe)):
        yield f"{flag} needs --micro-batch-tokens, the size of a micro-batch"
    if how == "dynapipe" and (size is not None or tokens is not None):
        yield (
            f"{flag} chooses the size of every micro-batch: remove --micro-batch-size and"
            " --micro-batch-tokens"
        )
    if how in (*PADDED, "pack") and f.flexpipe_slice_tokens not in ("auto", "0"):
        yield f"{flag} keeps samples whole: remove --flexpipe-slice-tokens"
    if how == "slices" and config.architecture == "bert":
        yield f"{flag}: BERT looks at all tokens of a sample at once, so none can be cut"
    if how in BY_WAY:
        changing = [n for n in ("flexpipe", "flexpipe_plans", "flexpipe_bitwise") if n in given]
        for name in changing:
            yield f"{flag} is for one plan that stays, and {flag_of(name)} is not: remove one"


def switching_problems(config: Config) -> Problems:
    f = config.flexpipe
    switches = ("flexpipe_switch", "flexpipe_twin")
    yield from without(config, "--flexpipe or --flexpipe-plans", f.plans_change, switches)
    planned = (
        "flexpipe_planner",
        "flexpipe_lookahead",
        "flexpipe_simulations",
        "flexpipe_unit",
    )
    yield from without(config, "--flexpipe", f.flexpipe, planned)
    if not re.fullmatch(r"auto|\d{1,6}", f.flexpipe_simulations):
        yield (
            f"--flexpipe-simulations {f.flexpipe_simulations}: expected a number of simulations,"
            " such as 50, or auto"
        )
    if f.flexpipe and f.flexpipe_plans is not None:
        yield "--flexpipe chooses the plans that --flexpipe-plans would give: remove one of them"
    for given, flag in ((f.flexpipe, "--flexpipe"), (f.flexpipe_record, "--flexpipe-record")):
        if given and config.evaluation.skip_train:
            yield f"{flag} has no effect with --skip-train: remove one of them"
    for flag, path, read in (
        ("--flexpipe-cluster", f.flexpipe_cluster, load_cluster),
        ("--flexpipe-profile", None if f.measures else f.flexpipe_profile, _read_profile),
    ):
        try:
            if path is not None:
                read(path)
        except (OSError, ValueError) as error:
            yield f"{flag}: {error}"
    yield from without(config, "--flexpipe-trace", f.flexpipe_trace, ("flexpipe_trace_interval",))
    keeps = f.flexpipe_twin_snapshot is not None
    yield from without(config, "--flexpipe-twin-snapshot", keeps, ("flexpipe_twin_timeout",))
    if keeps and not f.flexpipe_twin:
        yield "--flexpipe-twin-snapshot keeps what --flexpipe-no-twin forbids: remove one of them"
    c = config.checkpoint
    if keeps and c.save is not None and (c.load is None or Path(c.load) != Path(c.save)):
        yield (
            "--flexpipe-twin-snapshot goes on from the disk where host memory is lost too: give"
            " --load the directory of --save (and begin with another by --pretrained-checkpoint)"
        )
    if keeps and config.evaluation.skip_train:
        yield "--flexpipe-twin-snapshot has no effect with --skip-train: remove one of them"
    if f.flexpipe_switch == "restart" and not config.checkpoint.save:
        yield "--flexpipe-switch restart goes through checkpoints: give --save"


def _read_profile(path: str) -> Profile:
    return Profile.load(Path(path))
