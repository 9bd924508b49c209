"""Flags of recompute on a layout that stays. With --flexpipe the planner chooses it instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.config.option import option


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """Activations that are computed again in the backward pass, to need less memory. With
    --flexpipe the planner chooses them for every iteration."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """What of a layer is recomputed: full, all of it; selective, one half of it, as
    --recompute-modules says. Each half of a layer keeps its input."""

    recompute_activations: bool = False
    """The same as --recompute-granularity selective."""

    recompute_method: Literal["uniform", "block"] | None = None
    """With --recompute-granularity full, which layers: uniform, all; block, the first
    --recompute-num-layers of each stage."""

    recompute_num_layers: int | None = option(None, at_least=1)
    """Layers of each stage that are recomputed with --recompute-method block; 1 with uniform."""

    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] | None = None
    """With --recompute-granularity selective, which halves of all layers: core_attn, the attention
    half with its projections (also when it is not given); mlp, the other."""

    @property
    def selective(self) -> bool:
        """Whether halves of layers are recomputed."""
        return self.recompute_activations or self.recompute_granularity == "selective"

    @property
    def halves(self) -> tuple[str, ...]:
        """Which halves."""
        return self.recompute_modules or ("core_attn",)
