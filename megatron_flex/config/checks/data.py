"""Flags of the data and of the tokenizer."""

from __future__ import annotations

from megatron_flex.config.checks.without import Problems, without
from megatron_flex.config.config import Config, flag_of
from megatron_flex.config.data import DataOptions
from megatron_flex.config.tokenizer import NEEDS
from megatron_flex.data.paths import LEGACY_SPLIT, Split, parse_blend, split_bounds

_MANY_DOCUMENTS = 10**9  # only whether a share is zero counts here


def data_problems(config: Config) -> Problems:
    d, given = config.data, config.given
    parts = {"train_data_path", "valid_data_path", "test_data_path"} & given
    listed = "per_split_data_args_path" in given
    sources = (
        "data_path" in given,
        "data_args_path" in given,
        bool(parts),
        listed,
        d.mock_data,
    )
    if sum(sources) != 1:
        yield (
            "give one source of data: --data-path, --data-args-path, --train-data-path and its"
            " like, --per-split-data-args-path, or --mock-data"
            + (", not several" if any(sources) else "")
        )
        return
    if parts and not d.train_data_path and not config.evaluation.skip_train:
        yield "give --train-data-path beside --valid-data-path and --test-data-path"
    if (parts or listed) and "split" in given:
        yield "--split has no effect on data sets for each split: it divides --data-path"
    try:
        shares = _shares(d)
    except ValueError as error:
        yield str(error)
        return
    if not shares[Split.TRAIN] and not config.evaluation.skip_train:
        yield "the data flags leave nothing for training: change --split or the data paths"
    if "eval_interval" in given and not shares[Split.VALID]:
        yield (
            "--eval-interval needs validation data: give --valid-data-path or a share in --split,"
            " or remove it"
        )
    pair = d.sample_format == "pair"
    yield from without(config, "--sample-format pair", pair, ("pair_keys",))
    if pair and (config.architecture == "bert" or d.mock_data):
        yield "--sample-format pair is for GPT and data on disk: remove it"
    if d.sample_format == "chat":
        if config.architecture == "bert" or d.mock_data:
            yield "--sample-format chat is for GPT and data on disk: remove it"
        if d.overlong == "split":
            yield (
                "--overlong split is not for --sample-format chat, since later parts would answer"
                " to nothing: choose truncate, which cuts after an answer, or drop"
            )


def _shares(d: DataOptions) -> tuple[bool, bool, bool]:
    """Whether there is training, validation and test data; ``ValueError`` if paths are wrong."""
    parts = (d.train_data_path, d.valid_data_path, d.test_data_path)
    if any(parts):
        for name, prefixes in zip(("train", "valid", "test"), parts, strict=True):
            if prefixes:
                parse_blend(prefixes, f"--{name}-data-path")
        return bool(parts[0]), bool(parts[1]), bool(parts[2])
    if d.data_path:
        parse_blend(d.data_path, "--data-args-path" if d.data_args_path else "--data-path")
    bounds = split_bounds(LEGACY_SPLIT if d.split is None else d.split, _MANY_DOCUMENTS)
    train, valid, test = (start < stop for start, stop in bounds)
    return train, valid, test


def tokenizer_problems(config: Config) -> Problems:
    t = config.tokenizer
    for name in NEEDS[t.tokenizer_type]:
        if getattr(t, name) is None:
            yield f"--tokenizer-type {t.tokenizer_type} needs {flag_of(name)}"
    for name in ("tokenizer_model", "vocab_file", "merge_file", "vocab_size"):
        if name in config.given and name not in NEEDS[t.tokenizer_type]:
            yield f"{flag_of(name)} has no effect with --tokenizer-type {t.tokenizer_type}"
    if t.padded_vocab_size and "make_vocab_size_divisible_by" in config.given:
        yield "--make-vocab-size-divisible-by has no effect with --padded-vocab-size"
