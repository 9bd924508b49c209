"""Models by name: those of the FlexPipe paper (Table 1), and a large one for growth curves."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_flex.model.config import ModelConfig
from megatron_flex.schedule.shards import round_up


def _gpt(layers: int, hidden: int, heads: int) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=50257,
        padded_vocab_size=round_up(50257, 128),
        max_position_embeddings=65536,
        ffn_hidden_size=4 * hidden,
        kv_channels=hidden // heads,
        num_query_groups=heads,
        position_embedding_type="rope",
        params_dtype="bfloat16",
    )


def _bert(layers: int) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=1024,
        num_attention_heads=16,
        vocab_size=30522,
        padded_vocab_size=round_up(30522, 128),
        max_position_embeddings=8192,
        ffn_hidden_size=4096,
        kv_channels=64,
        num_query_groups=16,
        params_dtype="bfloat16",
        causal=False,
        architecture="bert",
    )


# GPT-13B: the paper prints hidden size 5140, which 40 heads do not divide; 5120 is meant.
MODELS: dict[str, ModelConfig] = {
    "bert-24": _bert(24),
    "bert-96": _bert(96),
    "gpt-3.35b": _gpt(16, 4096, 32),
    "gpt-13b": _gpt(40, 5120, 40),
    "gpt-128": _gpt(128, 12288, 96),
}

_SIZES = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "vocab_size",
    "padded_vocab_size", "max_position_embeddings", "ffn_hidden_size", "kv_channels",
)  # fmt: skip

PAPER_DEVICES = {"bert-24": 4, "bert-96": 8, "gpt-3.35b": 16, "gpt-13b": 32}
"""Devices that the paper trains each model on."""


def model(name: str) -> ModelConfig:
    """The model of that name, or of a JSON file with the fields of :class:`ModelConfig`.

    Raises ``ValueError`` that lists the names, or says what is wrong with the file.
    """
    key = name.lower().replace("_", "-")
    if key in MODELS:
        return MODELS[key]
    if not name.endswith(".json"):
        raise ValueError(
            f"no model '{name}': choose one of {', '.join(MODELS)}, or give a JSON file"
        )
    try:
        values = json.loads(Path(name).read_text())
        for field in _SIZES if isinstance(values, dict) else ():
            size = values.get(field, 1)
            if type(size) is not int or size < 1:
                raise ValueError(f"{field} must be a whole number above 0, not {size!r}")
        return ModelConfig(**values)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"--model {name} is no model: {error}") from error
