"""Frequencies of rotary position embeddings: megatron-core's, which itself asks for CUDA."""

from __future__ import annotations

import math

import torch

from megatron_flex.model.config import (
    HIGH_FREQUENCY_FACTOR,
    LOW_FREQUENCY_FACTOR,
    ORIGINAL_POSITIONS,
    ModelConfig,
)


def frequencies(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """``[rotary dimensions / 2]`` float32 radians a position."""
    size = config.kv_channels
    if config.rotary_percent < 1.0:
        size = int(size * config.rotary_percent)
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=device)
    plain = 1.0 / (config.rotary_base ** (steps / size))
    return scaled(plain, config.rope_scaling_factor) if config.use_rope_scaling else plain


def scaled(plain: torch.Tensor, factor: float) -> torch.Tensor:
    """Frequencies for ``factor`` times as many positions, as in Llama 3.1.

    Waves longer than the original number of positions are stretched by ``factor``, those shorter
    than a quarter of it are kept, and between the two there is a smooth passage.
    """
    wavelengths = 2 * math.pi / plain
    low, high = LOW_FREQUENCY_FACTOR, HIGH_FREQUENCY_FACTOR
    stretched = torch.where(wavelengths > ORIGINAL_POSITIONS / low, plain / factor, plain)
    share = (ORIGINAL_POSITIONS / wavelengths - low) / (high - low)
    smooth = (1 - share) * stretched / factor + share * stretched
    between = (wavelengths >= ORIGINAL_POSITIONS / high) & (wavelengths <= ORIGINAL_POSITIONS / low)
    return torch.where(between, smooth, stretched)
