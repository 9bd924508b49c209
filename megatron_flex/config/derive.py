"""Values of options that were not given but follow from others (Megatron's ``validate_args``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_flex.batch_size import BatchSizeSchedule
from megatron_flex.config.checkpoint import SAVE_INTERVAL
from megatron_flex.config.flexpipe import BASELINES

MODEL_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "seq_length",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "use_rope_scaling",
    "rope_scaling_factor",
    "normalization",
    "norm_epsilon",
    "swiglu",
    "openai_gelu",
    "apply_residual_connection_post_layernorm",
    "apply_layernorm_1p",
    "untie_embeddings_and_output_weights",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "bert_binary_head",
    "hidden_dropout",
    "attention_dropout",
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "vocab_size",
    "vocab_extra_ids",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
)
"""Fields that ``--use-checkpoint-args`` takes from the checkpoint."""


OF_THE_RUN = frozenset(
    {"hidden_dropout", "attention_dropout", "tokenizer_model", "vocab_file", "merge_file"}
)
"""Those of them that a run may change: a flag counts more than the checkpoint."""


def derive(values: dict[str, Any], world_size: int) -> list[str]:
    """Add what follows from the given values to ``values``.

    Args:
        values: options by field name; those that are neither given nor derived are absent.
        world_size: number of workers.

    Returns:
        What could not be derived, each with the flag to give.
    """
    problems: list[str] = []
    _derive_baseline(values)
    _derive_model(values, problems)
    _derive_paths(values, problems)
    _derive_tokenizer(values, problems)
    _derive_batches(values, world_size, problems)
    if values.get("save"):
        values.setdefault("save_interval", SAVE_INTERVAL)
    return problems


def _derive_baseline(v: dict[str, Any]) -> None:
    """What another system does."""
    if v.get("flexpipe_baseline") is not None:
        batching, schedule = BASELINES[v["flexpipe_baseline"]]
        v.setdefault("flexpipe_batching", batching)
        if schedule is not None:
            v.setdefault("flexpipe_schedule", schedule)


def _derive_model(v: dict[str, Any], problems: list[str]) -> None:
    hidden, heads = v.get("hidden_size"), v.get("num_attention_heads")
    if "ffn_hidden_size" not in v and hidden:
        # As in Megatron: two thirds, since the gate is a third matrix.
        v["ffn_hidden_size"] = (
            int((4 * hidden * 2 / 3) / 64) * 64 if v.get("swiglu") else 4 * hidden
        )
        if not v["ffn_hidden_size"]:
            problems.append("--hidden-size is too small for --swiglu: give --ffn-hidden-size")
    if "kv_channels" not in v and hidden and heads:
        if hidden % heads:
            problems.append(
                f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}:"
                " change one of them, or give --kv-channels"
            )
        v["kv_channels"] = max(1, hidden // heads)
    sequence = v.get("seq_length", v.get("max_sample_length"))
    if sequence is None:
        problems.append("give --seq-length (or --max-sample-length), the longest sample in tokens")
        sequence = 1
    v.setdefault("seq_length", sequence)
    v.setdefault("max_sample_length", sequence)
    v.setdefault("max_position_embeddings", max(v["seq_length"], v["max_sample_length"]))


def _derive_paths(v: dict[str, Any], problems: list[str]) -> None:
    """Data paths from the files that hold them."""
    if "data_args_path" in v and "data_path" not in v:
        flag = f"--data-args-path {v['data_args_path']}"
        words = _text(flag, v["data_args_path"], problems).split()
        v["data_path"] = tuple(words)
    if "per_split_data_args_path" in v:
        flag = f"--per-split-data-args-path {v['per_split_data_args_path']}"
        text = _text(flag, v["per_split_data_args_path"], problems)
        try:
            content = json.loads(text) if text else {"train": "", "valid": "", "test": ""}
            for split in ("train", "valid", "test"):
                part = content[split] or ()
                words = part.split() if isinstance(part, str) else [str(word) for word in part]
                v.setdefault(f"{split}_data_path", tuple(words))
        except (ValueError, KeyError, TypeError, AttributeError):
            problems.append(f"{flag} is no JSON object with keys train, valid and test")


def _text(flag: str, path: str, problems: list[str]) -> str:
    """Content of a file that a flag names; empty, with a problem, if there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{flag} cannot be read: {error}")
        return ""
    if not text.strip():
        problems.append(f"{flag} is empty: write data prefixes into it")
    return text.strip()


def _derive_tokenizer(v: dict[str, Any], problems: list[str]) -> None:
    if "tokenizer_type" not in v:
        v["tokenizer_type"] = "NullTokenizer"
        if not v.get("mock_data"):
            problems.append("give --tokenizer-type, the tokenizer that the data was made with")


def _derive_batches(v: dict[str, Any], world_size: int, problems: list[str]) -> None:
    size, tokens = v.get("micro_batch_size"), v.get("micro_batch_tokens")
    bitwise = v.get("flexpipe_bitwise")
    recorded = v.get("flexpipe_plans") or "cut " in (v.get("flexpipe_plan") or "")
    sliced = v.get("flexpipe_slice_tokens", "auto") not in ("auto", "0")
    planned = ((v.get("flexpipe") and not bitwise) or recorded or sliced) and size is None
    planned = planned or v.get("flexpipe_batching") == "dynapipe"
    if (size is None) == (tokens is None) and not planned:
        problems.append(
            "give either --micro-batch-tokens, which packs samples without padding, or"
            f" --micro-batch-size{', not both' if size else ''}"
            f"{': --flexpipe-bitwise cuts all batches alike' if bitwise else ''}"
        )
    if "global_batch_size" not in v:
        if size is None or v.get("flexpipe_plan"):
            problems.append("give --global-batch-size, the number of samples in a batch")
            size = size or 1
        stages = v.get("pipeline_model_parallel_size", 1)
        degree = max(1, world_size // (stages * v.get("tensor_model_parallel_size", 1)))
        v["global_batch_size"] = size * degree
    iterations, samples = v.get("train_iters"), v.get("train_samples")
    if (iterations is None) == (samples is None):
        problems.append(
            "give either --train-iters or --train-samples, the length of the run"
            f"{', not both' if samples else ''}"
        )
    try:
        schedule = BatchSizeSchedule(v["global_batch_size"], v.get("rampup_batch_size"))
    except ValueError as error:
        problems.append(str(error))
        schedule = BatchSizeSchedule(v["global_batch_size"])
    if iterations is None:
        v["train_iters"] = schedule.iterations(samples or 0)
        if samples and not v["train_iters"]:
            problems.append(
                f"--train-samples {samples} is less than one batch of --global-batch-size"
                f" {v['global_batch_size']}"
            )
