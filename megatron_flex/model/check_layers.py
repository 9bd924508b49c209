"""Whether this machine can run the layers that a model asks for; if not, the reason."""

from __future__ import annotations

import importlib.util
from importlib import metadata

import torch

from megatron_flex.model.config import ModelConfig

PACKAGE = "transformer_engine"
OLDEST = (2, 9)
"""Version of Transformer Engine that megatron-core 0.16 asks for."""
INSTEAD = "use --transformer-impl local"
_AVAILABLE = {
    "tensorwise": "is_fp8_available",
    "mxfp8": "is_mxfp8_available",
    "blockwise": "is_fp8_block_scaling_available",
}


def engine_version() -> str | None:
    """The installed version of Transformer Engine; ``None`` if there is none. Imports nothing."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:  # built from source without its metadata
        return "unknown"


def refusal(version: str | None, device: str) -> str | None:
    """Why Transformer Engine's layers cannot run on a ``device``; ``None`` if they can."""
    asked = "--transformer-impl transformer_engine"
    if device != "cuda":
        return (
            f"{asked}: Transformer Engine computes on NVIDIA GPUs only, and here is none; {INSTEAD}"
        )
    if version is None:
        return (
            f"{asked}: the package transformer-engine is not installed; {INSTEAD}, or install it"
            " with pip install 'transformer-engine[pytorch]>=2.9,<2.12'"
        )
    numbers = version.split("+")[0].split(".")[:2]
    if all(n.isdecimal() for n in numbers) and tuple(map(int, numbers)) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"{asked} needs Transformer Engine {oldest} or newer, not {version}: install that"
    return None


def check_layers(config: ModelConfig, device: torch.device) -> None:
    """Raise ``ValueError`` if ``device`` cannot run the layers of ``config``."""
    if config.transformer_impl == "local":
        return
    reason = refusal(engine_version(), device.type)
    if reason is None and config.fp8_format is not None:
        reason = _fp8_refusal(config.fp8_recipe)
    if reason is not None:
        raise ValueError(reason)


def _fp8_refusal(recipe: str) -> str | None:
    """Transformer Engine's own words on what this GPU cannot do."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    able, why = getattr(FP8GlobalStateManager, _AVAILABLE[recipe])()
    return None if able else f"--fp8-recipe {recipe} cannot be used on this GPU: {why}"
