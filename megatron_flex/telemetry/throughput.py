"""Tokens and floating-point operations a second.

The floating-point operations come with the records. ``planner/flops.py`` derives them from the
samples' own lengths, so that padding and recomputation do not count as work done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_flex.telemetry.record import IterationRecord

# Dense bfloat16 peak in TFLOP/s, from the vendors' data sheets; matched against the start of the
# device's name, longest first.
PEAK_TFLOPS_BF16 = {
    "NVIDIA A100": 312.0,
    "NVIDIA A800": 312.0,
    "NVIDIA A40": 149.7,
    "NVIDIA A30": 165.0,
    "NVIDIA A10": 125.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L40": 181.0,
    "NVIDIA L4": 121.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100": 989.4,
    "NVIDIA H800": 989.4,
    "NVIDIA H200": 989.4,
    "NVIDIA H20": 148.0,
    "NVIDIA GH200": 989.4,
    "NVIDIA B200": 2250.0,
}


@dataclass(frozen=True)
class Throughput:
    """Rates over some iterations.

    Attributes:
        tokens_per_second: input tokens of all workers, padding not counted.
        padding_percent: share of the computed positions that were padding.
        tflops: TFLOP/s of one worker.
        mfu_percent: ``tflops`` as a share of the device's peak; ``None`` if that is not known.
    """

    tokens_per_second: float
    padding_percent: float
    tflops: float
    mfu_percent: float | None


def throughput(
    records: Sequence[IterationRecord], world_size: int, peak_flops: float | None = None
) -> Throughput:
    """Rates of at least one iteration.

    Args:
        records: the iterations.
        world_size: workers.
        peak_flops: peak FLOP/s of one worker's device.
    """
    # A clock that did not move gives a huge rate, not a division by zero.
    elapsed = max(sum(r.elapsed for r in records), 1e-9)
    tokens = sum(r.tokens for r in records)
    padding = sum(r.padding for r in records)
    flops = sum(r.flops for r in records) / elapsed / world_size
    return Throughput(
        tokens_per_second=tokens / elapsed,
        padding_percent=100.0 * padding / max(1, tokens + padding),
        tflops=flops / 1e12,
        mfu_percent=None if peak_flops is None else 100.0 * flops / peak_flops,
    )


def known_peak_flops(device_name: str, *, bf16: bool) -> float | None:
    """Peak FLOP/s of a CUDA device by its name, for bfloat16; ``None`` if it is not known."""
    if bf16:
        for name in sorted(PEAK_TFLOPS_BF16, key=len, reverse=True):
            if device_name.startswith(name):
                return PEAK_TFLOPS_BF16[name] * 1e12
    return None
