"""A whole model in one process, for tools: from a checkpoint, or from a Hugging Face directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_flex.checkpoint.conversion.hugging_face.companions import CONFIG, GENERATION
from megatron_flex.checkpoint.conversion.hugging_face.files import read_json
from megatron_flex.checkpoint.conversion.shapes import check_weights
from megatron_flex.checkpoint.conversion.weights import Weights
from megatron_flex.model.attention import check_attention
from megatron_flex.model.blocks import Block, build_shell


def local_blocks(weights: Weights, device: torch.device) -> list[Block]:
    """All units, in evaluation mode, without gradients.

    Raises:
        CheckpointError: a weight is missing or has another shape.
        ValueError: no attention kernel can do it on ``device``.
    """
    check_weights(weights)
    config = weights.config
    # Dropout, which no kernel on CUDA has, is for training.
    check_attention(replace(config, attention_dropout=0.0), device)
    blocks = [build_shell(unit, config) for unit in config.layers.units]
    read: dict[str, nn.Parameter] = {}
    for block in blocks:
        for name in block.full_names():
            if name not in read:
                read[name] = nn.Parameter(weights.tensors[name].to(device), requires_grad=False)
            block.bind(name, read[name])
        block.eval()
    return blocks


def end_tokens(directory: Path | None) -> list[int]:
    """What a Hugging Face directory says ends a text: of ``generation_config.json``, or else of
    ``config.json``."""
    for name in (GENERATION, CONFIG):
        if directory is None or not (directory / name).is_file():
            continue
        found: Any = read_json(directory / name).get("eos_token_id")
        if found is not None:
            return [int(token) for token in (found if isinstance(found, list) else [found])]
    return []
