"""Flags of number formats."""

from __future__ import annotations

from dataclasses import dataclass

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
