"""What a run starts from, as far as each worker reads it by itself, in words that can be compared.

Where things lie may differ from server to server; what is there may not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_flex.config.config import GROUPS, Config
from megatron_flex.config.option import Option, options
from megatron_flex.data.batches import BatchSource
from megatron_flex.loop.assemble import Parts
from megatron_flex.loop.checkpointing import position_of
from megatron_flex.runtime.agreement import ABSENT, Facts

_OF_THE_SERVER = {"num_workers", "mmap_bin_files", "save", "wandb_project", "wandb_exp_name",
                  "wandb_entity", "wandb_save_dir", "tensorboard_dir", "log_file", "log_jsonl",
                  "flexpipe_record"}  # fmt: skip
"""Options that one worker alone uses, or each as suits its server."""
_WORDS = {"split", "pair_keys", "pipeline_model_parallel_layout", "flexpipe_plan",
          "flexpipe_slice_tokens", "flexpipe_simulations"}  # fmt: skip
"""Options whose text counts. Other texts are paths: whether there is one counts."""
_READ = {"flexpipe_cluster", "flexpipe_profile", "tokenizer_model", "vocab_file", "merge_file",
         "data_args_path", "per_split_data_args_path", "eval_generate",
         "chat_template"}  # fmt: skip
"""Paths of files that all workers read whole: what they hold counts."""
_PARTS = (".json", ".jinja", ".model", ".txt")
"""Files of a directory with a tokenizer that count, by the ends of their names."""
_FIRST = 8
"""Samples of each split whose lengths are compared; later ones are when their batch comes up."""


def of_the_flags(config: Config) -> Facts:
    """Flags, and what the files hold that they name."""
    found = {
        "the number of workers": str(config.world_size),
        "the number of workers on a server": os.environ.get("LOCAL_WORLD_SIZE", ABSENT),
        "the model": config.architecture,
    }
    for name, group in GROUPS.items():
        own = getattr(config, name)
        for option in options(group):
            if option.field not in _OF_THE_SERVER:
                found[option.flag] = _value(option, getattr(own, option.field))
    return found


def of_the_files(config: Config, parts: Parts) -> Facts:
    """The tokenizer, the data, and the checkpoint that the run goes on from.

    Raises ``CheckpointError``.
    """
    model, position = parts.model, position_of(config.checkpoint)
    found = {
        "the vocabulary": f"{model.vocab_size} of {model.padded_vocab_size} words",
        "the plan of the flags": str(parts.plan),
        "the iteration to go on from": str(position.iteration),
        "what micro-batches are cut by": str(position.coefficients),
    }
    for split in ("train", "valid", "test"):
        found |= dict(_data(f"the {split} data", getattr(parts, split)))
    if parts.questions is not None:
        asked = parts.questions
        found["the prompts"] = _digest(repr((asked.asked, asked.tokens, asked.stops)).encode())
    return found


def _value(option: Option, value: Any) -> str:
    text = option.kind is str and not option.choices
    if value is None or value == ():
        return ABSENT
    if not text or option.field in _WORDS:
        return str(value)
    return _contents(str(value)) if option.field in _READ else "given"


def _contents(text: str) -> str:
    """What a file or directory holds; what is neither, such as a described cluster, by its name."""
    path = Path(text)
    if path.is_dir():
        parts = sorted(p for p in path.iterdir() if p.name.endswith(_PARTS) and p.is_file())
        listed = "\n".join(f"{p.name} {p.stat().st_size}" for p in parts)
        return f"a directory with {len(parts)} files ({_digest(listed.encode())})"
    if path.is_file():
        return f"a file with the digest {_digest(path.read_bytes())}"
    return text


def _data(name: str, source: BatchSource | None) -> Iterator[tuple[str, str]]:
    if source is None:
        return
    counts = [one.selection.counts for one in source.sets]
    documents, samples = (sum(getattr(c, n) for c in counts) for n in ("documents", "samples"))
    yield name, f"{samples} samples of {documents} documents"
    size = _FIRST if source.num_samples is None else min(_FIRST, source.num_samples)
    if size:
        lengths = source.batch(0, size).lengths.tolist()
        yield f"{name}'s first lengths", " ".join(map(str, lengths))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
