"""What tests of conversations share: a tokenizer with the tokens of published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEMPLATES = Path(__file__).resolve().parents[2] / "data" / "chat_templates"
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]  # fmt: skip
_TEXTS = ["hello there, this is a small text\n\n", "assistant user system tool", "  \n\n\n  42 43"]


def write_tokenizer(directory: Path, template: str | None = None, **config: Any) -> Path:
    """A directory with a byte-level BPE that merges blanks and newlines, as Llama 3's does."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 3, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    content: dict[str, Any] = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}
    content |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        content["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(content | config))
    return directory


def template(name: str) -> str:
    """One of the published templates."""
    return (TEMPLATES / f"{name}.jinja").read_text()
