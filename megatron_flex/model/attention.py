"""Variable-length core attention for megatron-core's ``SelfAttention``.

Samples are packed one after the other; a token attends to its own sample only. The first may be a
slice of a longer sample: it attends to the slices before it too (``prefix.py``). The kernels are in
``attention_cpu.py`` and ``attention_cuda.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_flex.model import attention_cpu, attention_cuda
from megatron_flex.model.attention_options import AttentionOptions
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.context import PackedContext
from megatron_flex.model.megatron import (
    AttnMaskType,
    ProcessGroupCollection,
    Ranks,
    TransformerConfig,
)


def check_attention(config: ModelConfig, device: torch.device) -> None:
    """Raise ``ValueError`` if no attention kernel can do what ``config`` asks on ``device``."""
    if device.type == "cuda" and config.attention_dropout > 0.0:
        raise ValueError(
            "attention dropout that is keyed by sample runs on the CPU only; on CUDA set"
            " --attention-dropout 0 (hidden dropout works on both)"
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"there is no variable-length attention on '{device.type}' devices")


class VarlenAttention(torch.nn.Module):
    """``core_attention`` that takes the micro-batch's :class:`PackedContext` as attention mask.

    The constructor's arguments are megatron-core's. Its configuration does not say whether
    positions are rotary, so the block sets ``rotary`` afterwards.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        first = 0
        if pg_collection is not None and isinstance(pg_collection.tp, Ranks):
            group = pg_collection.tp.group
            first = group.index * (config.num_attention_heads // group.size)
        training = AttentionOptions(
            layer=layer_number - 1,
            causal=attn_mask_type is AttnMaskType.causal,
            scale=config.kv_channels**-0.5 if softmax_scale is None else softmax_scale,
            dropout=config.attention_dropout,
            rotary=False,
            first_head=first,
        )
        self._options = {True: training, False: replace(training, dropout=0.0)}

    def use_rotary(self) -> None:
        """Rotate queries and keys by their positions."""
        self._options = {t: replace(o, rotary=True) for t, o in self._options.items()}

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: PackedContext,
        **_: Any,
    ) -> torch.Tensor:
        """Query ``[T, 1, heads, d]``, key, value ``[T, 1, groups, d]`` -> ``[T, 1, heads * d]``."""
        options = self._options[self.training]
        if attention_mask.cut is not None and not options.causal:
            raise ValueError("only causal attention goes through the slices of a sample in order")
        attend = attention_cpu.attend if query.device.type == "cpu" else attention_cuda.attend
        out = attend(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            attention_mask,
            options,
        )
        return out.flatten(1).unsqueeze(1)
