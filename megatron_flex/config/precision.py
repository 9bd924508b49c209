"""Flags of number formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.config.option import option


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Number formats."""

    bf16: bool = False
    """Weights and activations in bfloat16, with master weights, gradients and optimizer state in
    fp32. Without it all is fp32."""

    accumulate_allreduce_grads_in_fp32: bool = option(True, always=True)
    """Accumulate and reduce gradients in fp32: always."""

    attention_softmax_in_fp32: bool = option(True, always=True)
    """Compute the attention's softmax in fp32: always."""

    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Multiply in fp8 in the layers, with --transformer-impl transformer_engine and --bf16: all in
    e4m3, or gradients in e5m2 (hybrid). Micro-batches are padded to a multiple of 16, 32 or 128
    tokens, as the recipe needs it."""

    fp8_recipe: Literal["tensorwise", "mxfp8", "blockwise"] = "tensorwise"
    """What has a scale of its own, made of its present values: a tensor, 32 values, or 128 values
    (of weights 128 x 128). mxfp8 needs Blackwell GPUs, the others Hopper. Megatron-LM's default is
    delayed, which is refused."""
