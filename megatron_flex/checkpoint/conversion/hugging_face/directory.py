"""A Hugging Face directory as one end of a conversion."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_flex.checkpoint import layout
from megatron_flex.checkpoint.conversion.hugging_face import companions
from megatron_flex.checkpoint.conversion.hugging_face.families import (
    Family,
    Fields,
    family_for,
    family_of,
)
from megatron_flex.checkpoint.conversion.hugging_face.files import (
    Stored,
    find_stored,
    plan_shards,
    read_json,
    write_shards,
)
from megatron_flex.checkpoint.conversion.hugging_face.tensors import (
    TOKEN_TYPES,
    canonical,
    cut,
    join,
    naming_of,
    source_of,
)
from megatron_flex.checkpoint.conversion.shapes import weight_shapes
from megatron_flex.checkpoint.conversion.weights import Weights
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.lazy import LazyTensors, forms_of
from megatron_flex.checkpoint.load import NOT_STRUCTURAL
from megatron_flex.model.config import ModelConfig

MAX_SHARD_SIZE = 5 * 10**9
"""Bytes of one file, as in transformers."""

_HEADS = ("pooler.dense.weight", "binary_head.weight")


@dataclass(frozen=True)
class ReadOptions:
    """What a user may say about a directory.

    Attributes:
        ignored: fields of config.json that are not looked at.
        max_position_embeddings: the longest sample, where the model allows more.
        checking: tensors that have no place are an error.
        say: gets a sentence about what is not as one may expect.
    """

    ignored: tuple[str, ...] = ()
    max_position_embeddings: int | None = None
    checking: bool = True
    say: Callable[[str], object] = print


def read_hugging_face(
    directory: Path, model_type: str, options: ReadOptions = ReadOptions()
) -> Weights:
    """The model in a directory of safetensors. Tensors are read when they are asked for.

    ``model_type`` is ``GPT`` or ``BERT``. Raises :class:`CheckpointError` for a model that
    megatron_flex cannot compute, naming the field of config.json.
    """
    values = read_json(directory / companions.CONFIG)
    family = family_of(values.get("model_type"))
    if family.bert != (model_type == "BERT"):
        raise CheckpointError(
            f"{directory} holds a {family.model_type}: give --model-type"
            f" {'BERT' if family.bert else 'GPT'}"
        )
    naming = naming_of(family.model_type)
    stored = {canonical(name, naming): part for name, part in find_stored(directory).items()}
    binary = family.bert and all(_source(name, family, 1) in stored for name in _HEADS)
    config = read_config(values, options, binary_head=binary)
    tensors = _Joined(config, family, stored)
    if family.bert and not binary:
        _check_without_types(stored)
    if options.checking:
        _check_superfluous(config, family, stored, tensors.used)
    arguments, remark = companions.tokenizer_arguments(directory, config.vocab_size)
    if remark:
        options.say(f"{directory}: {remark}")
    # Samples of the full length are not what a run usually wants: it gives --seq-length itself.
    return Weights(
        replace(config, params_dtype="bfloat16" if tensors.dtype is torch.bfloat16 else "float32"),
        tensors,
        arguments=Namespace(**arguments, seq_length=None, make_vocab_size_divisible_by=1),
        companions=directory.absolute(),
    )


def read_config(
    values: Mapping[str, Any], options: ReadOptions = ReadOptions(), *, binary_head: bool = False
) -> ModelConfig:
    """The configuration that a ``config.json`` describes, in float32."""
    family = family_of(values.get("model_type"))
    limit = options.max_position_embeddings
    if limit is not None:
        if "max_position_embeddings" not in values:
            raise CheckpointError(
                f"--max-position-embeddings is for rotary models: a {family.model_type} has learned"
                " positions"
            )
        values = {
            **values,
            "max_position_embeddings": min(limit, values["max_position_embeddings"]),
        }
    fields = Fields(values)
    try:
        found = family.read(fields)
        rows = fields.take("vocab_size")
        fields.finish(options.ignored)
        return ModelConfig(
            vocab_size=rows,
            padded_vocab_size=rows,
            causal=not family.bert,
            architecture="bert" if family.bert else "gpt",
            num_tokentypes=2 if binary_head else 0,
            binary_head=binary_head,
            **found,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"config.json: {error}") from error


class _Joined(LazyTensors):
    """Megatron's parameters, each read and put together when it is asked for."""

    def __init__(self, config: ModelConfig, family: Family, stored: Mapping[str, Stored]) -> None:
        self._config = config
        self._parts: dict[str, tuple[Any, list[Stored]]] = {}
        self.used: set[str] = set()
        joined: dict[str, torch.Tensor] = {}
        for name in weight_shapes(config):
            source = source_of(name, family.model_type, config.num_layers)
            for one in source.names:
                if one not in stored:
                    raise CheckpointError(f"the weights lack {one}, which config.json asks for")
            parts = [stored[one] for one in source.names]
            self.used.update(source.names)
            self._parts[name] = source.layout, parts
            try:
                joined[name] = join(config, source.layout, [part.form for part in parts])
            except RuntimeError as error:
                shapes = ", ".join(f"{p.name} {list(p.form.shape)}" for p in parts)
                raise CheckpointError(f"{shapes}: not of a model with this config.json") from error
        types = {form.dtype for form in joined.values()}
        # float32 holds every value of the others.
        self.dtype = torch.bfloat16 if types == {torch.bfloat16} else torch.float32
        self.forms = {name: form.to(self.dtype) for name, form in joined.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        layout_, parts = self._parts[name]
        return join(self._config, layout_, [part.read() for part in parts]).to(self.dtype)


def _source(name: str, family: Family, num_layers: int) -> str:
    return source_of(name, family.model_type, num_layers).names[0]


def _check_without_types(stored: Mapping[str, Stored]) -> None:
    """A BERT without sentence-order head has no token types here: their first row must be zero."""
    types = stored.get(TOKEN_TYPES)
    if types is not None and types.read()[0].any():
        raise CheckpointError(
            "this BERT has no sentence-order head (bert.pooler and cls.seq_relationship), and then"
            " models have no token types here, whose rows in the file are not zero: load it with"
            " transformers.BertForPreTraining, which adds the head, and save_pretrained it again"
        )


def _check_superfluous(
    config: ModelConfig, family: Family, stored: Mapping[str, Stored], used: set[str]
) -> None:
    pattern = re.compile(naming_of(family.model_type).superfluous)
    without_types = family.bert and not config.binary_head
    for name, part in stored.items():
        known = name in used or pattern.fullmatch(name) or (without_types and name == TOKEN_TYPES)
        if not known:
            raise CheckpointError(
                f"{part.name} {list(part.form.shape)} has no place in the model"
                " (--no-checking ignores it)"
            )


# ---- writing ----------------------------------------------------------------------------------


def write_hugging_face(
    directory: Path,
    weights: Weights,
    *,
    model_type: str | None = None,
    source: Path | None = None,
    chat_template: Path | None = None,
    dtype: str | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> Path:
    """Write a directory that transformers loads, all or nothing.

    Args:
        directory: must not exist yet, or be empty.
        weights: the model; its tensors are asked for one after the other.
        model_type: Hugging Face's name; ``None`` takes that of the ``source``, or the first that
            fits.
        source: a directory whose config.json and tokenizer files go along; ``None`` takes the
            companions of the weights.
        chat_template: a file that takes the place of the source's. What ends an answer in it ends
            what is generated, as with any template of a model that was trained on conversations.
        dtype: ``float32``, ``bfloat16`` or ``float16``; ``None`` keeps the precision.
        max_shard_size: bytes.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} is not empty: give another --save-dir, or remove it")
    config = weights.config
    source = source or weights.companions
    carried = {} if source is None else read_json(source / companions.CONFIG)
    family = _family(config, model_type, carried)
    text = json.dumps(
        _config_json(weights, family, carried, dtype or config.params_dtype), indent=2
    )
    precision = getattr(torch, dtype or config.params_dtype)

    def cut_up(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        found = source_of(name, family.model_type, config.num_layers)
        yield from zip(found.names, cut(config, found.layout, tensor.to(precision)), strict=True)

    forms = {
        there: part for name, form in forms_of(weights.tensors).items()
        for there, part in cut_up(name, form)
    }  # fmt: skip
    types = torch.zeros(2, config.hidden_size, dtype=precision)
    without_types = family.bert and not config.num_tokentypes
    if without_types:
        forms[TOKEN_TYPES] = types

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in weights.tensors:
            yield from cut_up(name, weights.tensors[name])
        if without_types:
            yield TOKEN_TYPES, types

    directory.absolute().parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.absolute().parent / f".tmp-{directory.name}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        write_shards(temporary, plan_shards(forms, max_shard_size), tensors())
        if source is not None:
            companions.copy(companions.companions_in(source), temporary)
        else:
            files, remark = companions.tokenizer_files(weights.arguments)
            if family.model_type == "qwen2" and companions.TOKENIZER_CONFIG in files:
                remark = remark or companions.NOT_QWEN
            if remark:
                print(remark)
            for name, content in files.items():
                layout.write_synced(temporary / name, content)
        layout.write_synced(temporary / companions.CONFIG, (text + "\n").encode())
        if chat_template is not None:
            layout.write_synced(temporary / companions.CHAT_TEMPLATE, chat_template.read_bytes())
        if chat_template or getattr(weights.arguments, "sample_format", None) == "chat":
            companions.end_with_the_turn(temporary)
        layout.sync_directory(temporary)
        os.rename(temporary, directory)
        layout.sync_directory(directory.absolute().parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return directory


def _family(config: ModelConfig, wanted: str | None, carried: Mapping[str, Any]) -> Family:
    if wanted is None and carried:
        family = family_of(carried.get("model_type"))
        if family.bert == (config.architecture == "bert") and family.misfit(config) is None:
            return family
    if wanted is None:
        return family_for(config)
    family = family_of(wanted)
    if family.bert != (config.architecture == "bert"):
        raise CheckpointError(f"the checkpoint holds a {config.architecture}, no {wanted}")
    if misfit := family.misfit(config):
        raise CheckpointError(f"this model is no {wanted}: {misfit}")
    return family


def _config_json(
    weights: Weights, family: Family, carried: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """The carried fields, if there are any, with those that the model decides where it differs."""
    config = weights.config
    decided = {**family.write(config), "vocab_size": config.vocab_size}
    if carried.get("model_type") == family.model_type:
        result = dict(carried)
        if not _same(carried, config):
            for name in ("rope_parameters", "layer_types"):
                result.pop(name, None)
            result |= decided
    else:
        architecture = family.architecture
        if family.bert and not config.binary_head:
            architecture = architecture.replace("PreTraining", "MaskedLM")
        end = companions.end_token(weights.arguments)
        result = {
            "architectures": [architecture],
            "model_type": family.model_type,
            **decided,
            "bos_token_id": None,
            "eos_token_id": end,
        }
    result["dtype" if "dtype" in result else "torch_dtype"] = dtype
    return result


def _same(carried: Mapping[str, Any], config: ModelConfig) -> bool:
    """Whether a config.json describes this model as it is."""
    try:
        options = ReadOptions(tuple(carried), None)
        read = asdict(read_config(carried, options, binary_head=config.binary_head))
    except CheckpointError:
        return False
    ours = asdict(config)
    return all(read[name] == ours[name] for name in ours if name not in NOT_STRUCTURAL)
